package main

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math"
	"math/rand"
	"net"
	"runtime"
	"sort"
	"sync"
	"time"
)

// Task is one pass of one job; the fields are explained in bench_work/tasks.py.
type Task struct {
	Job      string  `json:"job"`
	Channels int     `json:"channels"`
	Size     int     `json:"size"`
	Batch    int     `json:"batch"`
	Each     bool    `json:"each"`
	Seconds  float64 `json:"seconds"`
	Count    int     `json:"count"`
	Least    int     `json:"least"`
}

// Measured is the result of a pass.
type Measured struct {
	Count     int                `json:"count"`
	Units     float64            `json:"units"`
	Seconds   float64            `json:"seconds"`
	ClientCPU float64            `json:"client_cpu"`
	ServerCPU float64            `json:"server_cpu"`
	Also      map[string]float64 `json:"also"`
}

const (
	mib           = 1 << 20
	firstBytes    = 2 * mib // of bulk, and
	firstMessages = 2000    // small ones: how much the first trial sends, on all channels together
	firstEchoes   = 200
	part          = 0.2 // of a pass: the shortest trial that decides how much work fills a pass
	warm          = 4   // the verified warm-up is this part of a pass, once its size is known
	step          = 16  // times as much work at most is tried next when a trial was too short
	idlePart      = 0.25
	ahead         = 64 // messages that the neighbour orders together
	bulkSize      = 65_536
	idleBefore    = 64
)

// payloads returns a few different messages, so that lost, doubled and swapped ones are noticed.
func payloads(size int) [][]byte {
	source := rand.New(rand.NewSource(int64(size)))
	made := make([][]byte, 16)
	for i := range made {
		made[i] = make([]byte, size)
		source.Read(made[i])
	}
	return made
}

// Client is one connection of the client, and the channel on which it asks the server for reports.
type Client struct {
	session Session
	control *Channel
	task    Task
	began   Cost
}

// Cost is wall time and processor time, in seconds.
type Cost struct{ wall, client, server float64 }

func (c Cost) of(count int, units float64, also map[string]float64) Measured {
	if also == nil {
		also = map[string]float64{}
	}
	return Measured{count, units, c.wall, c.client, c.server, also}
}

func measure(kind string, address string, task Task) Measured {
	connection, err := net.Dial("tcp", address)
	must(err)
	client := &Client{session: newSession(kind, connection, true), task: task}
	client.control = client.open()
	defer client.session.Close()
	switch task.Job {
	case "bulk", "small":
		return client.stream(client.openAll())
	case "among":
		client.echoOnEach(client.openAll())
		return client.stream([]*Channel{client.open()})
	case "rtt":
		return client.roundTrip()
	case "storm":
		return client.storm()
	case "openclose":
		return client.openAndClose()
	case "neighbour":
		return client.neighbour()
	case "idle":
		return client.idle()
	}
	panic(wrong("unknown job " + task.Job))
}

func (c *Client) open() *Channel {
	stream, err := c.session.open()
	must(err)
	return newChannel(stream)
}

func (c *Client) openAll() []*Channel {
	opened := make([]*Channel, c.task.Channels)
	for i := range opened {
		opened[i] = c.open()
	}
	return opened
}

func (c *Client) usage(way byte) Numbers {
	c.control.send(Order{way: way}.pack())
	return unpackNumbers(c.control.answer())
}

var start = time.Now()

func now() float64 { return time.Since(start).Seconds() }

func (c *Client) begin() {
	runtime.GC()
	server := float64(c.usage(report)[0]) / 1e9
	c.began = Cost{now(), float64(cpuTime()) / 1e9, server}
}

func (c *Client) cost() Cost {
	wall, client := now(), float64(cpuTime())/1e9
	server := float64(c.usage(report)[0]) / 1e9
	return Cost{wall - c.began.wall, client - c.began.client, server - c.began.server}
}

// together runs all parts at the same time; the clock starts when every goroutine is ready.
func (c *Client) together(count int, run func(int)) Cost {
	begin := make(chan struct{})
	var done sync.WaitGroup
	for i := 0; i < count; i++ {
		done.Add(1)
		go func(i int) {
			defer fail()
			<-begin
			run(i)
			done.Done()
		}(i)
	}
	c.begin()
	close(begin)
	done.Wait()
	return c.cost()
}

// fit warms up, verifying all payload, and returns how many units on each channel fill a pass.
func (c *Client) fit(first int, run func(count int, verify bool) Cost) int {
	if c.task.Count > 0 {
		run(largest(1, c.task.Count/warm), true)
		return c.task.Count
	}
	count := first
	run(count, true)
	for {
		wall := math.Max(run(count, false).wall, 1e-6)
		full := int(math.Round(float64(count) * c.task.Seconds / wall))
		if wall >= part*c.task.Seconds {
			return largest(largest(1, c.task.Least), full)
		}
		count = smallest(count*step, largest(count+1, full))
	}
}

func (c *Client) stream(opened []*Channel) Measured {
	size := c.task.Size
	isBulk := size > messageSize
	way, first := byte(many), firstMessages
	if isBulk {
		way, first = bulk, firstBytes/size
	} else if c.task.Each {
		way = each
	}
	messages := payloads(size)
	prepared := make([][]byte, len(messages))
	for i, message := range messages {
		prepared[i] = message
		if !isBulk {
			prepared[i] = append(binary.BigEndian.AppendUint32(nil, uint32(size)), message...)
		}
	}
	run := func(count int, verify bool) Cost {
		order := Order{way, verify, uint32(size), uint64(count)}
		return c.together(len(opened), func(i int) { send(opened[i], order, messages, prepared, c.task.Batch) })
	}
	count := c.fit(largest(1, first/len(opened)), run)
	cost := run(count, false)
	units := float64(count * len(opened))
	if isBulk {
		units *= float64(size) / mib
	}
	return cost.of(count, units, nil)
}

func send(channel *Channel, order Order, messages, prepared [][]byte, batch int) {
	channel.send(order.pack())
	count := int(order.messages)
	if batch > 1 {
		var whole []byte
		for i := 0; i < batch; i++ {
			whole = append(whole, prepared[i%len(prepared)]...)
		}
		one := len(prepared[0])
		for ; count >= batch; count -= batch {
			channel.send(whole)
		}
		channel.send(whole[:count*one])
	} else {
		for i := 0; i < count; i++ {
			channel.send(prepared[i%len(prepared)])
		}
	}
	check(channel.answer(), order, messages)
}

func check(receipt []byte, order Order, messages [][]byte) {
	found := unpackNumbers(receipt)
	if found[0] != order.messages || found[1] != order.messages*uint64(order.size) {
		panic(wrong("the receipt names another number of messages or bytes than were sent"))
	}
	if order.verify {
		crc := uint32(0)
		for i := 0; i < int(order.messages); i++ {
			crc = crc32.Update(crc, crc32.IEEETable, messages[i%len(messages)])
		}
		if uint64(crc) != found[2] {
			panic(wrong("the CRC-32 of the received bytes is not that of the sent bytes"))
		}
	}
}

func (c *Client) echoOnEach(opened []*Channel) {
	messages := payloads(messageSize)
	for i, channel := range opened {
		channel.send(messages[i%len(messages)])
	}
	for i, channel := range opened {
		compare(channel.answer(), messages[i%len(messages)])
	}
}

func (c *Client) roundTrip() Measured {
	channel, messages := c.open(), payloads(messageSize)
	var times []float64
	run := func(count int, verify bool) Cost {
		times = times[:0]
		return c.together(1, func(int) {
			for i := 0; i < count; i++ {
				times = append(times, ping(channel, messages[i%len(messages)]))
			}
		})
	}
	count := c.fit(firstEchoes, run)
	cost := run(count, false)
	return cost.of(count, float64(count), map[string]float64{"p50": percentile(times, 50), "p99": percentile(times, 99)})
}

func (c *Client) storm() Measured {
	opened, messages := c.openAll(), payloads(messageSize)
	run := func(count int, verify bool) Cost {
		return c.together(len(opened), func(i int) {
			for number := 0; number < count; number++ {
				ping(opened[i], messages[number%len(messages)])
			}
		})
	}
	count := c.fit(largest(2, firstEchoes/len(opened)), run)
	cost := run(count, false)
	return cost.of(count, float64(count*len(opened)), nil)
}

func (c *Client) openAndClose() Measured {
	messages := payloads(messageSize)
	run := func(count int, verify bool) Cost {
		return c.together(c.task.Channels, func(int) {
			for number := 0; number < count; number++ {
				channel := c.open()
				ping(channel, messages[number%len(messages)])
				must(channel.stream.Close())
			}
		})
	}
	count := c.fit(largest(1, firstEchoes/c.task.Channels), run)
	cost := run(count, false)
	return cost.of(count, float64(count*c.task.Channels), nil)
}

// neighbour measures round trips on one channel, first alone, then beside a channel with bulk traffic.
func (c *Client) neighbour() Measured {
	channel, beside := c.open(), c.open()
	messages, large := payloads(messageSize), payloads(bulkSize)
	pingFor := func(seconds float64) (times []float64) {
		for end, i := now()+seconds, 0; i == 0 || now() < end; i++ {
			times = append(times, ping(channel, messages[i%len(messages)]))
		}
		return times
	}
	pingFor(c.task.Seconds * idlePart)
	idle := pingFor(c.task.Seconds * idlePart)
	send(beside, Order{bulk, true, bulkSize, ahead}, large, large, 1)
	order := Order{bulk, false, bulkSize, ahead}
	stop, ordered := make(chan struct{}), make(chan struct{}, 1<<20)
	var sent counter
	var done sync.WaitGroup
	done.Add(2)
	go func() {
		defer fail()
		defer done.Done()
		defer close(ordered)
		for {
			select {
			case <-stop:
				return
			default:
			}
			ordered <- struct{}{}
			beside.send(order.pack())
			for i := 0; i < ahead; i++ {
				beside.send(large[0])
				sent.add()
			}
		}
	}()
	go func() {
		defer fail()
		defer done.Done()
		for range ordered {
			check(beside.answer(), order, large)
		}
	}()
	pingFor(0.05)
	c.begin()
	before := sent.now()
	loaded := pingFor(c.task.Seconds)
	during := sent.now() - before
	cost := c.cost()
	close(stop)
	done.Wait()
	return cost.of(len(loaded), float64(len(loaded)), map[string]float64{
		"idle_p50": percentile(idle, 50), "p50": percentile(loaded, 50), "p99": percentile(loaded, 99),
		"bulk": float64(during) * bulkSize / mib / cost.wall,
	})
}

// idle measures the memory that an open channel takes on each side.
func (c *Client) idle() Measured {
	var streams []any // without the reader that a used channel has
	grow := func(to int) Numbers {
		for len(streams) < to {
			stream, err := c.session.open()
			must(err)
			streams = append(streams, stream)
		}
		for int(c.usage(report)[2]) < to {
			time.Sleep(10 * time.Millisecond)
		}
		return c.usage(reportCollected)
	}
	c.usage(report) // the first channel that the server hears of is not kept
	serverBefore, clientBefore := grow(idleBefore), memoryNow()
	c.begin()
	serverAfter := grow(idleBefore + c.task.Channels)
	cost := c.cost()
	clientAfter := memoryNow()
	perChannel := func(before, after uint64) float64 {
		return (float64(after) - float64(before)) / float64(c.task.Channels)
	}
	return cost.of(1, float64(c.task.Channels), map[string]float64{
		"client_bytes": perChannel(clientBefore, clientAfter), "server_bytes": perChannel(serverBefore[1], serverAfter[1]),
	})
}

func ping(channel *Channel, message []byte) float64 {
	began := now()
	channel.send(message)
	answer := channel.answer()
	took := now() - began
	compare(answer, message)
	return took
}

func compare(came, sent []byte) {
	if !bytes.Equal(came, sent) {
		panic(wrong("an echo is not what was sent"))
	}
}

func percentile(times []float64, percent float64) float64 {
	sorted := append([]float64(nil), times...)
	sort.Float64s(sorted)
	return sorted[largest(0, int(math.Ceil(float64(len(sorted))*percent/100))-1)]
}

type counter struct {
	lock  sync.Mutex
	count int
}

func (c *counter) add() {
	c.lock.Lock()
	c.count++
	c.lock.Unlock()
}

func (c *counter) now() int {
	c.lock.Lock()
	defer c.lock.Unlock()
	return c.count
}

func largest(a, b int) int {
	if a > b {
		return a
	}
	return b
}

func smallest(a, b int) int {
	if a < b {
		return a
	}
	return b
}
