// Both ends of `yamux_speed.py` with hashicorp's implementation in Go.
//
//	speed serve              listen, print the port, and serve one connection
//	speed call PORT JOB N    do a job N times over a connection, and print its seconds
package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/hashicorp/yamux"
)

const small, large = 64, 64 * 1024

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func serve(stream *yamux.Stream) {
	defer stream.Close()
	reader := bufio.NewReaderSize(stream, large)
	verb, err := reader.ReadString('\n')
	check(err)
	if verb == "echo\n" {
		io.Copy(stream, reader)
		return
	}
	var size int64
	fmt.Sscanf(verb, "sink %d", &size)
	_, err = io.CopyN(io.Discard, reader, size)
	check(err)
	binary.Write(stream, binary.BigEndian, uint64(size))
}

func open(session *yamux.Session, verb string) *yamux.Stream {
	stream, err := session.OpenStream()
	check(err)
	_, err = stream.Write([]byte(verb + "\n"))
	check(err)
	return stream
}

func push(session *yamux.Session, size int, count int) {
	stream := open(session, fmt.Sprintf("sink %d", size*count)) // a closed stream can't read, so the end is agreed on
	data := make([]byte, size)
	for i := 0; i < count; i++ {
		_, err := stream.Write(data)
		check(err)
	}
	var total uint64
	check(binary.Read(stream, binary.BigEndian, &total))
	check(stream.Close())
}

func echo(stream *yamux.Stream) {
	data := make([]byte, small)
	_, err := stream.Write(data)
	check(err)
	_, err = io.ReadFull(stream, data)
	check(err)
}

func call(port string, job string, count int) {
	connection, err := net.Dial("tcp", "127.0.0.1:"+port)
	check(err)
	session, err := yamux.Client(connection, nil)
	check(err)
	echo(open(session, "echo"))
	began := time.Now()
	switch job {
	case "small":
		push(session, small, count)
	case "bulk":
		push(session, large, count)
	case "trip":
		stream := open(session, "echo")
		for i := 0; i < count; i++ {
			echo(stream)
		}
	case "open":
		for i := 0; i < count; i++ {
			stream := open(session, "echo")
			echo(stream)
			check(stream.Close())
		}
	}
	fmt.Println(time.Since(began).Seconds())
	session.Close()
}

func main() {
	if os.Args[1] == "call" {
		count, err := strconv.Atoi(os.Args[4])
		check(err)
		call(os.Args[2], os.Args[3], count)
		return
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	connection, err := listener.Accept()
	check(err)
	session, err := yamux.Server(connection, nil)
	check(err)
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			return
		}
		go serve(stream)
	}
}
