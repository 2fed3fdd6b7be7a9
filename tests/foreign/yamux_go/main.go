// A peer for the tests of muxkit's yamux: the other end of random conversations, with hashicorp's implementation.
//
//	peer client|server ADDRESS
//
// A server listens, prints its port, and serves one connection. A client connects. Either side then serves the streams
// that muxkit opens. The first line of a stream says what this program does on it:
//
//	echo            send back what comes, until its end
//	digest MS       wait, then read everything, and answer with the hash
//	source N        send N bytes of a known pattern, then close
//	leave N         read N bytes, then close without reading the rest
//	open K N        open K streams to muxkit, send N bytes on each, and expect them back; answer "ok" or the error
//	ping            send a ping; answer "ok"
//	goaway          send a go-away; answer "ok"
package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

func pattern(size int, seed int) []byte {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i*7 + i>>8 + seed)
	}
	return data
}

func call(session *yamux.Session, size int, seed int) error {
	stream, err := session.OpenStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	sent := pattern(size, seed)
	var wrote error
	var writing sync.WaitGroup
	writing.Add(1)
	go func() {
		defer writing.Done()
		_, wrote = stream.Write(sent)
	}()
	got := make([]byte, size)
	_, err = io.ReadFull(stream, got)
	writing.Wait()
	if err != nil || wrote != nil {
		return fmt.Errorf("read: %v, wrote: %v", err, wrote)
	}
	if !bytes.Equal(got, sent) {
		return fmt.Errorf("%d bytes came back different", size)
	}
	return nil
}

func serve(session *yamux.Session, stream *yamux.Stream) {
	defer stream.Close()
	reader := bufio.NewReader(stream)
	line, err := reader.ReadString('\n')
	if err != nil {
		return
	}
	var verb string
	var first, second int
	fmt.Sscanf(line, "%s %d %d", &verb, &first, &second)
	switch verb {
	case "echo":
		io.Copy(stream, reader)
	case "digest":
		time.Sleep(time.Duration(first) * time.Millisecond)
		sum := sha256.New()
		size, _ := io.Copy(sum, reader)
		fmt.Fprintf(stream, "%d %s\n", size, hex.EncodeToString(sum.Sum(nil)))
	case "source":
		stream.Write(pattern(first, second))
	case "leave":
		io.CopyN(io.Discard, reader, int64(first))
	case "open":
		var calls sync.WaitGroup
		failures := make(chan error, first)
		for i := 0; i < first; i++ {
			calls.Add(1)
			go func(seed int) {
				defer calls.Done()
				if err := call(session, second, seed); err != nil {
					failures <- err
				}
			}(i)
		}
		calls.Wait()
		close(failures)
		if err, failed := <-failures; failed {
			fmt.Fprintf(stream, "%v\n", err)
		} else {
			fmt.Fprintf(stream, "ok\n")
		}
	case "ping":
		if _, err := session.Ping(); err != nil {
			fmt.Fprintf(stream, "%v\n", err)
		} else {
			fmt.Fprintf(stream, "ok\n")
		}
	case "goaway":
		session.GoAway()
		fmt.Fprintf(stream, "ok\n")
	default:
		fmt.Fprintf(stream, "what is %q?\n", line)
	}
}

func main() {
	role, address := os.Args[1], os.Args[2]
	config := yamux.DefaultConfig()
	var connection net.Conn
	var session *yamux.Session
	var err error
	if role == "server" {
		listener, failed := net.Listen("tcp", address)
		if failed != nil {
			panic(failed)
		}
		fmt.Println(listener.Addr().(*net.TCPAddr).Port)
		if connection, err = listener.Accept(); err != nil {
			panic(err)
		}
		session, err = yamux.Server(connection, config)
	} else {
		if connection, err = net.Dial("tcp", address); err != nil {
			panic(err)
		}
		session, err = yamux.Client(connection, config)
	}
	if err != nil {
		panic(err)
	}
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			break
		}
		go serve(session, stream)
	}
	fmt.Println("over", session.NumStreams())
}
