// Both ends of the benchmark for the multiplexers in Go: hashicorp's yamux and xtaci's smux.
//
//	go_muxes yamux|smux server [--core=N] [--hold] ADDRESS
//	go_muxes yamux|smux client [--core=N] ADDRESS
//
// The program speaks the protocol of adapters/muxkit_bench/bench_work/play.py: the parent writes one task per line of
// standard input, and each answer is one line of JSON. The jobs, the orders to the server and the verification are
// those of bench_work, written once more in Go. main.go has the process, muxes.go the two libraries, orders.go the
// messages between the ends, and jobs.go the jobs.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

// say prints one answer for the parent.
func say(answer any) {
	line, err := json.Marshal(answer)
	must(err)
	fmt.Println(string(line))
}

// wrong is the panic of a check that failed; the parent shows its text.
type wrong string

func must(err error) {
	if err != nil {
		panic(wrong(err.Error()))
	}
}

// fail reports a panic to the parent and ends the process. Every goroutine defers it.
func fail() {
	if reason := recover(); reason != nil {
		say(map[string]string{"failed": fmt.Sprint(reason)})
		os.Exit(1)
	}
}

// pin restricts the whole process to one core. Affinity belongs to a thread, and Go has started several threads
// already, so the process restricts one and then executes itself again from it.
func pin(core int) {
	const marker = "GO_MUXES_PINNED"
	if os.Getenv(marker) != "" {
		return
	}
	runtime.LockOSThread()
	var mask [16]uint64
	mask[core/64] |= 1 << (core % 64)
	_, _, failed := syscall.RawSyscall(
		syscall.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(mask), uintptr(unsafe.Pointer(&mask)))
	if failed != 0 {
		must(failed)
	}
	path, err := os.Executable()
	must(err)
	must(syscall.Exec(path, os.Args, append(os.Environ(), marker+"=1")))
}

func lines() *bufio.Scanner {
	scanner := bufio.NewScanner(os.Stdin)
	scanner.Buffer(nil, 1<<20)
	return scanner
}

func main() {
	defer fail()
	kind, role, hold, address := os.Args[1], os.Args[2], false, ""
	for _, argument := range os.Args[3:] {
		switch {
		case strings.HasPrefix(argument, "--core="):
			core, err := strconv.Atoi(strings.TrimPrefix(argument, "--core="))
			must(err)
			pin(core)
		case argument == "--hold":
			hold = true
		default:
			address = argument
		}
	}
	if role == "server" {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		must(err)
		say(map[string]string{"ready": listener.Addr().String()})
		go listen(listener, kind, hold)
		for scanner := lines(); scanner.Scan(); {
		}
		return
	}
	say(map[string]string{"ready": address})
	for scanner := lines(); scanner.Scan(); {
		var task Task
		must(json.Unmarshal(scanner.Bytes(), &task))
		say(measure(kind, address, task))
	}
}
