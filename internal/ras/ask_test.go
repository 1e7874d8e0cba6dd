package ras_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/ras"
	"github.com/gochorus/chorus/internal/ras/rastest"
	"github.com/gochorus/chorus/internal/testport"
)

var oneRank = rastest.Answer(rastest.Rank{Host: "10.0.0.1", PID: 1})

func TestAsk(t *testing.T) {
	a, err := ras.AskPatiently(rastest.Serve(t, oneRank), time.Minute)
	require.NoError(t, err)
	require.Len(t, a.Communicators, 1)
	require.Equal(t, ras.Rank{Host: "10.0.0.1", PID: 1, Counts: map[string]uint64{"AllGather": 1, "AllReduce": 0, "Broadcast": 0, "Reduce": 0, "ReduceScatter": 0}}, a.Communicators[0].Ranks[0])
}

// The kernel may choose a process that is stopped. Another connection reaches one that answers.
func TestAskTriesAnotherProcess(t *testing.T) {
	t.Parallel()
	var count atomic.Int32
	addr := rastest.Listen(t, func(c net.Conn) {
		if count.Add(1) < 3 {
			_, _ = io.Copy(io.Discard, c) // silent until the client closes the connection
			return
		}
		rastest.Speak(c, true, func() string { return oneRank })
	})
	_, err := ras.AskPatiently(addr, 2*time.Second)
	require.NoError(t, err)
	require.GreaterOrEqual(t, count.Load(), int32(3))
}

// Services that do not answer well give an error, within the limit of Ask.
func TestAskRefuses(t *testing.T) {
	say := func(text string) func(net.Conn) {
		return func(c net.Conn) { _, _ = io.WriteString(c, text); _, _ = io.Copy(io.Discard, c) }
	}
	answer := func(text string) func(net.Conn) {
		return func(c net.Conn) { rastest.Speak(c, true, func() string { return text }) }
	}
	for name, c := range map[string]struct {
		serve func(net.Conn)
		want  string
	}{
		"silent":         {say(""), "i/o timeout"},
		"closes":         {func(c net.Conn) { _, _ = bufio.NewReader(c).ReadString('\n') }, "EOF"},
		"another":        {say("220 smtp.example ESMTP\x1b[2J\n"), `the answer to the handshake is "220 smtp.example ESMTP\x1b[2J": want SERVER PROTOCOL`},
		"no number":      {say("SERVER PROTOCOL x\n"), "the answer to the handshake"},
		"long line":      {say(strings.Repeat("x", 1000)), "a line of the answer has more than 256 bytes"},
		"no JSON":        {func(c net.Conn) { rastest.Speak(c, false, nil) }, `the answer to SET FORMAT json is "ERROR: Unknown command SET FORMAT json"`},
		"no answer":      {answer(""), "the answer is not JSON"},
		"garbage":        {answer("\x00\xff"), "the answer is not JSON"},
		"too long":       {answer(strings.Repeat(" ", ras.MaxAnswer+1)), "the answer has more than 16777216 bytes"},
		"silent at last": {func(c net.Conn) { rastest.Speak(c, true, func() string { _, _ = io.Copy(io.Discard, c); return "" }) }, "i/o timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := rastest.Listen(t, c.serve)
			var err error
			if strings.HasPrefix(name, "silent") {
				begin := time.Now()
				_, err = ras.Ask(addr)
				require.Less(t, time.Since(begin), 10*time.Second)
			} else {
				_, err = ras.AskPatiently(addr, time.Minute)
			}
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "\x1b")
		})
	}
}

// A service that sends one byte after the other does not extend the limit.
func TestAskSlowService(t *testing.T) {
	addr := rastest.Listen(t, func(c net.Conn) {
		rastest.Speak(c, true, func() string {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for range tick.C {
				if _, err := io.WriteString(c, " "); err != nil {
					break
				}
			}
			return ""
		})
	})
	_, err := ras.Ask(addr)
	require.ErrorContains(t, err, "i/o timeout")
}

func TestAskWithoutService(t *testing.T) {
	_, err := ras.AskPatiently(fmt.Sprint("127.0.0.1:", testport.Reserve(t)), time.Minute)
	require.ErrorContains(t, err, "connection refused")
	_, err = ras.Ask("not an address")
	require.ErrorContains(t, err, "not an address")
}

func TestAddress(t *testing.T) {
	for _, c := range []struct {
		enable, addr string
		virtual      bool
		want         string
	}{
		{"", "", false, "localhost:28028"},
		{"1", "10.0.0.1:9", false, "10.0.0.1:9"},
		{"0", "10.0.0.1:9", false, ""},
		{"0x0", "", false, ""},
		{"no", "", false, "localhost:28028"},
		{"", "", true, ""},
		{"", "10.0.0.1:9", true, "10.0.0.1:9"},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			t.Setenv("NCCL_RAS_ENABLE", c.enable)
			t.Setenv("NCCL_RAS_ADDR", c.addr)
			require.Equal(t, c.want, ras.Address(c.virtual))
		})
	}
}
