// A client with Go's standard library: `go run client.go [URL]`
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"time"
)

// Answer is the reply to POST /infer: an object for each sequence, or an error, with a code for programs and a text for people.
type Answer struct {
	Outputs     []map[string]any
	Session     struct{ Steps int }
	Code, Error string
}

// infer returns the reply, and an error if nothing answers or the service refuses the request. Without a session it is empty.
func infer(url string, body map[string]any, session string) (answer Answer, err error) {
	encoded, _ := json.Marshal(body)
	request, err := http.NewRequest("POST", url+"/infer", bytes.NewReader(encoded))
	if err != nil {
		return
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("x-session-id", session) // proxies read it
	if key := os.Getenv("SEQSERVE_CLIENT_KEY"); key != "" {
		request.Header.Set("Authorization", "Bearer "+key)
	}
	reply, err := (&http.Client{Timeout: 10 * time.Second}).Do(request)
	if err != nil {
		return
	}
	defer reply.Body.Close()
	if err = json.NewDecoder(reply.Body).Decode(&answer); err == nil && answer.Code != "" {
		err = fmt.Errorf("%s: %s", answer.Code, answer.Error)
	}
	return
}

func main() {
	url := append(os.Args, "http://127.0.0.1:8000")[1]
	answer, err := infer(url, map[string]any{"model": "question-type", "inputs": []string{"How far is it from Denver to Aspen ?"}}, "")
	if err != nil {
		panic(err)
	}
	fmt.Println(answer.Outputs[0]["label"])
	rows, session := [][]float64{{0.1, -0.4, 0.2}, {0.3, -0.4, 0.5}, {0.2, -0.3, 0.4}}, fmt.Sprint("pump-", os.Getpid())
	for sent, row := range rows { // each request is the next chunk of the session
		chunk := map[string]any{"model": "sensor-forecast", "inputs": [][][]float64{{row}}, "start": sent == 0, "end": sent == len(rows)-1}
		if answer, err = infer(url, chunk, session); err != nil {
			panic(err)
		}
		fmt.Printf("%d steps: %.3f\n", answer.Session.Steps, answer.Outputs[0]["value"])
	}
	_, err = infer(url, map[string]any{"model": "nobody", "inputs": []string{"?"}}, "")
	fmt.Println(err)
}
