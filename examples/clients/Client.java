import java.io.IOException;
import java.net.URI;
import java.net.http.*;
import java.time.Duration;
import java.util.regex.*;

/** A client of the Open Inference Protocol with the JDK alone: `java Client.java [URL]`. */
public class Client {
    static final float[][] ROWS = {{0.1f, -0.4f, 0.2f}, {0.3f, -0.4f, 0.5f}, {0.2f, -0.3f, 0.4f}};
    static final HttpClient HTTP = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();

    /** An error of the service. The code is for programs, the message for people. */
    static class Refused extends Exception {
        Refused(String body) {
            super(find("\"code\":\"([^\"]*)\"", body) + ": " + find("\"error\":\"((?:[^\"\\\\]|\\\\.)*)\"", body));
        }
    }

    public static void main(String[] arguments) throws Exception {
        String url = arguments.length > 0 ? arguments[0] : "http://127.0.0.1:8000";
        String question = "\"How far is it from Denver to Aspen ?\"";
        String reply = infer(url, "", "question-type", "{}", "text", "[1]", "BYTES", question);
        System.out.println(find("\"name\":\"label\".*?\"data\":\\[\"(.*?)\"\\]", reply));

        String session = "pump-" + ProcessHandle.current().pid();
        for (int sent = 0; sent < ROWS.length; sent++) { // each request is the next chunk of the session
            String parameters = String.format("{\"sequence_id\": \"%s\", \"sequence_start\": %b, \"sequence_end\": %b}",
                session, sent == 0, sent == ROWS.length - 1);
            String row = ROWS[sent][0] + "," + ROWS[sent][1] + "," + ROWS[sent][2];
            reply = infer(url, session, "sensor-forecast", parameters, "inputs", "[1, 1, 3]", "FP32", row);
            System.out.println(find("\"sequence_steps\":(\\d+)", reply) + " steps: " + find("\"data\":\\[(.*?)\\]", reply));
        }

        try {
            infer(url, "", "nobody", "{}", "text", "[1]", "BYTES", "\"?\"");
        } catch (Refused error) {
            System.out.println(error.getMessage());
        }
    }

    /** Returns the reply for one input tensor. Proxies read the session. Throws Refused. A program with a JSON library uses that. */
    static String infer(String url, String session, String model, String parameters, String name, String shape, String type,
            String data) throws IOException, InterruptedException, Refused {
        String input = String.format("{\"name\": \"%s\", \"shape\": %s, \"datatype\": \"%s\", \"data\": [%s]}", name, shape, type, data);
        String body = String.format("{\"parameters\": %s, \"inputs\": [%s]}", parameters, input);
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(url + "/v2/models/" + model + "/infer"))
            .timeout(Duration.ofSeconds(10)).POST(HttpRequest.BodyPublishers.ofString(body));
        String key = System.getenv("SEQSERVE_CLIENT_KEY");
        if (key != null) request.header("Authorization", "Bearer " + key);
        if (!session.isEmpty()) request.header("x-session-id", session);
        HttpResponse<String> response = HTTP.send(request.build(), HttpResponse.BodyHandlers.ofString());
        if (response.statusCode() >= 400) throw new Refused(response.body());
        return response.body();
    }

    static String find(String pattern, String text) {
        Matcher found = Pattern.compile(pattern).matcher(text);
        return found.find() ? found.group(1) : "";
    }
}
