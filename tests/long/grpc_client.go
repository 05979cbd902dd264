// Calls a server with gRPC for Go. Arguments: address of the server, folder with the bodies of requests, one per file.
//
// It has no generated code and knows no message: it writes the body of a reply to a file beside the request.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const service = "/inference.GRPCInferenceService/"

// bytesCodec sends and receives bodies as they are.
type bytesCodec struct{}

func (bytesCodec) Marshal(body any) ([]byte, error) { return *body.(*[]byte), nil }

func (bytesCodec) Unmarshal(data []byte, body any) error {
	*body.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func (bytesCodec) Name() string { return "proto" }

type client struct {
	connection *grpc.ClientConn
	folder     string
}

func (c client) request(name string) []byte {
	data, err := os.ReadFile(filepath.Join(c.folder, name))
	check(err)
	return data
}

func (c client) call(ctx context.Context, method string, request []byte, options ...grpc.CallOption) ([]byte, error) {
	var reply []byte
	err := c.connection.Invoke(ctx, service+method, &request, &reply, options...)
	return reply, err
}

// save writes the reply to a request to a file, and returns it.
func (c client) save(method, name string) []byte {
	reply, err := c.call(context.Background(), method, c.request(name))
	check(err)
	check(os.WriteFile(filepath.Join(c.folder, name+".reply"), reply, 0o644))
	return reply
}

// refusal returns the status of a call, and the code of the error in its trailer.
func (c client) refusal(name string) string {
	var trailer metadata.MD
	_, err := c.call(context.Background(), "ModelInfer", c.request(name), grpc.Trailer(&trailer))
	return fmt.Sprintf("code %d %s", status.Code(err), trailer.Get("seqserve-code")[0])
}

func (c client) compressed(request []byte) []byte {
	reply, err := c.call(context.Background(), "ModelInfer", request, grpc.UseCompressor(gzip.Name))
	check(err)
	return reply
}

// countAnswers returns how many of concurrent calls get the answer. Each call has a deadline of its own.
func (c client) countAnswers(calls int, request, answer []byte) (answers int) {
	replies := make(chan []byte)
	for number := 0; number < calls; number++ {
		timeout := 5*time.Minute + time.Duration(number)*time.Millisecond
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			reply, err := c.call(ctx, "ModelInfer", request)
			check(err)
			replies <- reply
		}()
	}
	for number := 0; number < calls; number++ {
		if bytes.Equal(<-replies, answer) {
			answers++
		}
	}
	return answers
}

func (c client) stream(ctx context.Context) (grpc.ClientStream, error) {
	description := grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	return c.connection.NewStream(ctx, &description, service+"ModelStreamInfer")
}

// countReplies sends requests on a stream, and returns how many of the replies end with the answer.
func (c client) countReplies(requests int, request, answer []byte) (replies int) {
	stream, err := c.stream(context.Background())
	check(err)
	for number := 0; number < requests; number++ {
		check(stream.SendMsg(&request))
	}
	check(stream.CloseSend())
	for {
		var reply []byte
		err := stream.RecvMsg(&reply)
		if err == io.EOF {
			return replies
		}
		check(err)
		if bytes.HasSuffix(reply, answer) {
			replies++
		}
	}
}

// cancel cancels a stream after its first reply, and returns its status.
func (c client) cancel(request []byte) codes.Code {
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := c.stream(ctx)
	check(err)
	check(stream.SendMsg(&request))
	var reply []byte
	check(stream.RecvMsg(&reply))
	cancel()
	return status.Code(stream.RecvMsg(&reply))
}

// exceedDeadline opens a stream, sends nothing, and returns its status.
func (c client) exceedDeadline() codes.Code {
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	stream, err := c.stream(ctx)
	if err == nil {
		err = stream.RecvMsg(new([]byte))
	}
	return status.Code(err)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithDefaultCallOptions(grpc.ForceCodec(bytesCodec{})))
	check(err)
	defer connection.Close()
	c := client{connection, os.Args[2]}
	question := c.request("question")
	answer := c.save("ModelInfer", "question")
	c.save("ModelInfer", "long")
	fmt.Println("compressed", bytes.Equal(c.compressed(question), answer))
	fmt.Println(c.countAnswers(500, question, answer), "answers")
	fmt.Println(c.refusal("unknown"))
	fmt.Println(c.refusal("large"))
	fmt.Println(c.countReplies(50, question, answer), "replies on a stream")
	fmt.Printf("cancelled %d\n", c.cancel(question))
	fmt.Printf("deadline %d\n", c.exceedDeadline())
	c.save("ServerReady", "ready")
}
