package testhost

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
)

// Listen calls serve for each connection, until the test ends, and returns the address.
func Listen(t testing.TB, serve func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	return ln.Addr().String()
}

// ServeRAS runs a service that answers STATUS in JSON, and returns its address.
func ServeRAS(t testing.TB, answer string) (addr string) {
	t.Helper()
	return Listen(t, func(c net.Conn) { SpeakRAS(c, true, func() string { return answer }) })
}

// SpeakRAS answers the commands of a client like NCCL's src/ras/client_support.cc. NCCL before 2.28.7 has
// no JSON.
func SpeakRAS(c net.Conn, hasJSON bool, answer func() string) {
	asJSON := false
	for lines := bufio.NewScanner(c); lines.Scan(); {
		command := lines.Text()
		switch name := strings.ToLower(command); {
		case strings.HasPrefix(name, "client protocol "):
			fmt.Fprint(c, "SERVER PROTOCOL 2\n")
		case strings.HasPrefix(name, "timeout "):
			fmt.Fprint(c, "OK\n")
		case name == "set format json" && hasJSON:
			asJSON = true
			fmt.Fprint(c, "OK\n")
		case name == "status" && asJSON:
			fmt.Fprint(c, answer())
			return // NCCL closes the connection after the answer
		case name == "status":
			fmt.Fprint(c, "NCCL version 2.27.7+cuda13.0 compiled with CUDA 13.0\n")
			return
		default:
			fmt.Fprintf(c, "ERROR: Unknown command %s\n", command)
		}
	}
}

// A RASRank is a rank of the communicator of an answer.
type RASRank struct {
	Host       string
	PID        int
	AllReduces int // launched
	Broadcasts int // launched
	AsyncError int
	Silent     bool // the process does not answer
	Dead       bool // and has not for a minute
}

// RASAnswer returns the answer for a communicator, with the fields and line ends of NCCL 2.29.
func RASAnswer(ranks ...RASRank) string {
	var live, missing []string
	for i, r := range ranks {
		head := fmt.Sprintf("        {\n          \"rank\": %d,\n          \"host\": \"%s\",\n          \"pid\": %d,\n          \"cuda_dev\": %d,\n          \"nvml_dev\": %d,\n          \"status\": {\n", i, r.Host, r.PID, i, i)
		if r.Silent || r.Dead {
			missing = append(missing, head+fmt.Sprintf("            \"unresponsive\": true,\n            \"considered_dead\": %t\n          }\n        }", r.Dead))
			continue
		}
		live = append(live, head+fmt.Sprintf("            \"init_state\": 0,\n            \"async_error\": %d,\n            \"finalize_called\": false,\n            \"destroy_flag\": false,\n            \"abort_flag\": false\n          },\n", r.AsyncError)+
			fmt.Sprintf("          \"collective_counts\": {\n            \"Broadcast\": %d,\n            \"Reduce\": 0,\n            \"AllGather\": 1,\n            \"ReduceScatter\": 0,\n            \"AllReduce\": %d\n          }\n        }", r.Broadcasts, r.AllReduces))
	}
	return "{\n  \"nccl_version\": \"2.29.2+cuda13.0\",\n  \"cuda_runtime_version\": 13000,\n  \"cuda_driver_version\": 13000,\n  \"timestamp\": \"2026-11-27 12:00:00\",\n  \"communicators_count\": 1,\n  \"communicators\": [\n" +
		fmt.Sprintf("    {\n      \"hash\": \"0x5c1d8d1a3f0b2c44\",\n      \"secondary_hash\": \"0x9f1c3:0x77a1\",\n      \"size\": %d,\n      \"ranks_count\": %d,\n      \"missing_ranks_count\": %d,\n      \"ranks\": [\n", len(ranks), len(live), len(missing)) +
		strings.Join(live, ",\n") + "\n      ],\n      \"missing_ranks\": [\n" + strings.Join(missing, ",\n") +
		"\n      ]\n    }\n  ],\n  \"ras\": {\n    \"collection_time_sec\": 0.004,\n    \"timeouts_count\": 0\n  }\n}\n"
}

// RASWithBug2289 removes the commas that NCCL 2.28.9 omits in the missing ranks of an answer.
func RASWithBug2289(answer string) string {
	before, missing, _ := strings.Cut(answer, `"missing_ranks": [`)
	lines := strings.Split(missing, "\n")
	for i, line := range lines {
		if strings.Contains(line, `"nvml_dev"`) {
			lines[i] = strings.TrimSuffix(line, ",")
		}
	}
	return before + `"missing_ranks": [` + strings.Join(lines, "\n")
}
