package main

import (
	"bufio"
	"io"
	"net"

	"github.com/hashicorp/yamux"
	"github.com/xtaci/smux"
)

// Session is what the two libraries have in common. Both are used with their default settings.
type Session interface {
	open() (io.ReadWriteCloser, error)
	accept() (io.ReadWriteCloser, error)
	Close() error
}

type yamuxSession struct{ *yamux.Session }

func (s yamuxSession) open() (io.ReadWriteCloser, error)   { return s.OpenStream() }
func (s yamuxSession) accept() (io.ReadWriteCloser, error) { return s.AcceptStream() }

type smuxSession struct{ *smux.Session }

func (s smuxSession) open() (io.ReadWriteCloser, error)   { return s.OpenStream() }
func (s smuxSession) accept() (io.ReadWriteCloser, error) { return s.AcceptStream() }

func newSession(kind string, connection net.Conn, isClient bool) Session {
	switch {
	case kind == "yamux" && isClient:
		session, err := yamux.Client(connection, nil)
		must(err)
		return yamuxSession{session}
	case kind == "yamux":
		session, err := yamux.Server(connection, nil)
		must(err)
		return yamuxSession{session}
	case kind == "smux" && isClient:
		session, err := smux.Client(connection, nil)
		must(err)
		return smuxSession{session}
	case kind == "smux":
		session, err := smux.Server(connection, nil)
		must(err)
		return smuxSession{session}
	}
	panic(wrong("unknown multiplexer " + kind))
}

// Channel is one stream. Its reader has room for 64 KiB, so that small messages do not cost a call each.
type Channel struct {
	stream io.ReadWriteCloser
	reader *bufio.Reader
}

func newChannel(stream io.ReadWriteCloser) *Channel {
	return &Channel{stream, bufio.NewReaderSize(stream, 65_536)}
}

func (c *Channel) send(data []byte) {
	_, err := c.stream.Write(data)
	must(err)
}

// receive reads one message of 64 bytes. It returns false if the peer has closed the stream, or the whole session: a
// client closes its session without closing each stream, and the libraries report that by different errors.
func (c *Channel) receive() ([]byte, bool) {
	data := make([]byte, messageSize)
	_, err := io.ReadFull(c.reader, data)
	return data, err == nil
}

func (c *Channel) answer() []byte {
	data, isOpen := c.receive()
	if !isOpen {
		panic(wrong("the stream ended before the answer"))
	}
	return data
}
