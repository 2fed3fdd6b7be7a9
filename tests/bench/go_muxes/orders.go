package main

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

const messageSize = 64 // bytes: an order, a receipt, and every message that is echoed

var magic = []byte("\x00bench\x00\xff")

// The kinds of orders.
const (
	bulk            = 1 // take large messages without frames
	many            = 2 // take small messages
	each            = 3 // take small messages one by one
	report          = 4 // report what this process has used
	reportCollected = 5 // the same, after a collection of garbage
)

// Order tells the server what to take.
type Order struct {
	way      byte
	verify   bool
	size     uint32
	messages uint64
}

func (o Order) pack() []byte {
	data := make([]byte, messageSize)
	copy(data, magic)
	data[8] = o.way
	if o.verify {
		data[9] = 1
	}
	binary.BigEndian.PutUint32(data[12:], o.size)
	binary.BigEndian.PutUint64(data[16:], o.messages)
	return data
}

func unpackOrder(data []byte) Order {
	return Order{data[8], data[9] == 1, binary.BigEndian.Uint32(data[12:]), binary.BigEndian.Uint64(data[16:])}
}

// Numbers are a receipt (messages, bytes, CRC-32) or a report (ns of processor time, bytes of memory, kept channels).
type Numbers [3]uint64

func (n Numbers) pack() []byte {
	data := make([]byte, messageSize)
	for i, number := range n {
		binary.BigEndian.PutUint64(data[8*i:], number)
	}
	return data
}

func unpackNumbers(data []byte) (n Numbers) {
	for i := range n {
		n[i] = binary.BigEndian.Uint64(data[8*i:])
	}
	return n
}

// cpuTime returns the processor time of this process in nanoseconds.
func cpuTime() uint64 {
	var usage syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return uint64(usage.Utime.Nano() + usage.Stime.Nano())
}

// memoryNow returns the resident bytes of this process after a collection of garbage.
func memoryNow() uint64 {
	debug.FreeOSMemory()
	data, err := os.ReadFile("/proc/self/statm")
	must(err)
	pages, err := strconv.ParseUint(strings.Fields(string(data))[1], 10, 64)
	must(err)
	return pages * uint64(os.Getpagesize())
}

var kept atomic.Uint64 // channels without a goroutine of ours

func listen(listener net.Listener, kind string, hold bool) {
	defer fail()
	for {
		connection, err := listener.Accept()
		must(err)
		go accept(newSession(kind, connection, false), hold)
	}
}

// accept serves the channels of a session. With `hold` it keeps all but the first without a goroutine.
func accept(session Session, hold bool) {
	var held []io.ReadWriteCloser
	for isFirst := true; ; isFirst = false {
		stream, err := session.accept()
		if err != nil {
			kept.Add(-uint64(len(held)))
			return
		}
		if hold && !isFirst {
			held = append(held, stream)
			kept.Add(1)
			continue
		}
		go serve(newChannel(stream))
	}
}

// serve obeys orders and echoes every other message until the client closes the channel.
func serve(channel *Channel) {
	defer channel.stream.Close()
	for {
		message, isOpen := channel.receive()
		if !isOpen {
			return
		}
		if !bytes.HasPrefix(message, magic) {
			if _, err := channel.stream.Write(message); err != nil {
				return
			}
			continue
		}
		switch order := unpackOrder(message); order.way {
		case report:
			channel.send(Numbers{cpuTime(), 0, kept.Load()}.pack())
		case reportCollected:
			channel.send(Numbers{cpuTime(), memoryNow(), kept.Load()}.pack())
		default:
			channel.send(channel.take(order).pack())
		}
	}
}

// take receives the messages of an order.
func (c *Channel) take(order Order) Numbers {
	defer fail()
	crc := uint32(0)
	total := order.messages * uint64(order.size)
	if order.way == bulk {
		data := make([]byte, 262_144)
		for came := uint64(0); came < total; {
			part := data[:min(uint64(len(data)), total-came)]
			size, err := c.reader.Read(part)
			must(err)
			if order.verify {
				crc = crc32.Update(crc, crc32.IEEETable, part[:size])
			}
			came += uint64(size)
		}
		return Numbers{order.messages, total, uint64(crc)}
	}
	var head [4]byte
	for number := uint64(0); number < order.messages; number++ {
		_, err := io.ReadFull(c.reader, head[:])
		must(err)
		if size := binary.BigEndian.Uint32(head[:]); size != order.size {
			panic(wrong("a message has " + strconv.Itoa(int(size)) + " bytes"))
		}
		message := make([]byte, order.size) // an application would copy it as well
		_, err = io.ReadFull(c.reader, message)
		must(err)
		if order.verify {
			crc = crc32.Update(crc, crc32.IEEETable, message)
		}
	}
	return Numbers{order.messages, total, uint64(crc)}
}

func min(a, b uint64) uint64 {
	if a < b {
		return a
	}
	return b
}
