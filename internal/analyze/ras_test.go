package analyze_test

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

	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/testhost"
)

var oneRank = testhost.RASAnswer(testhost.RASRank{Host: "10.0.0.1", PID: 1})

func TestAsk(t *testing.T) {
	a, err := analyze.AskRASWithin(testhost.ServeRAS(t, oneRank), time.Minute)
	require.NoError(t, err)
	require.Len(t, a.Communicators, 1)
	require.Equal(t, analyze.RASRank{Host: "10.0.0.1", PID: 1, Counts: map[string]uint64{"AllGather": 1, "AllReduce": 0, "Broadcast": 0, "Reduce": 0, "ReduceScatter": 0}}, a.Communicators[0].Ranks[0])
}

// The kernel may choose a process that is stopped. Another connection reaches one that answers.
func TestAskTriesAnotherProcess(t *testing.T) {
	t.Parallel()
	var count atomic.Int32
	addr := testhost.Listen(t, func(c net.Conn) {
		if count.Add(1) < 3 {
			_, _ = io.Copy(io.Discard, c) // silent until the client closes the connection
			return
		}
		testhost.SpeakRAS(c, true, func() string { return oneRank })
	})
	_, err := analyze.AskRASWithin(addr, 2*time.Second)
	require.NoError(t, err)
	require.GreaterOrEqual(t, count.Load(), int32(3))
}

// Services that do not answer well give an error, within the limit of Ask.
func TestAskRefuses(t *testing.T) {
	say := func(text string) func(net.Conn) {
		return func(c net.Conn) { _, _ = io.WriteString(c, text); _, _ = io.Copy(io.Discard, c) }
	}
	answer := func(text string) func(net.Conn) {
		return func(c net.Conn) { testhost.SpeakRAS(c, true, func() string { return text }) }
	}
	for name, c := range map[string]struct {
		serve func(net.Conn)
		want  string
	}{
		"silent":    {say(""), "i/o timeout"},
		"closes":    {func(c net.Conn) { _, _ = bufio.NewReader(c).ReadString('\n') }, "EOF"},
		"another":   {say("220 smtp.example ESMTP\x1b[2J\n"), `the answer to the handshake is "220 smtp.example ESMTP\x1b[2J" and not SERVER PROTOCOL`},
		"no number": {say("SERVER PROTOCOL x\n"), "the answer to the handshake"},
		"long line": {say(strings.Repeat("x", 1000)), "a line of the answer has more than 256 bytes"},
		"no JSON":   {func(c net.Conn) { testhost.SpeakRAS(c, false, nil) }, `the answer to SET FORMAT json is "ERROR: Unknown command SET FORMAT json"`},
		"no answer": {answer(""), "the answer is not JSON"},
		"garbage":   {answer("\x00\xff"), "the answer is not JSON"},
		"too long":  {answer(strings.Repeat(" ", analyze.MaxRASAnswer+1)), "the answer has more than 16777216 bytes"},
		"silent at last": {func(c net.Conn) {
			testhost.SpeakRAS(c, true, func() string { _, _ = io.Copy(io.Discard, c); return "" })
		}, "i/o timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := testhost.Listen(t, c.serve)
			var err error
			if strings.HasPrefix(name, "silent") {
				begin := time.Now()
				_, err = analyze.AskRAS(addr)
				require.Less(t, time.Since(begin), 10*time.Second)
			} else {
				_, err = analyze.AskRASWithin(addr, time.Minute)
			}
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "\x1b")
		})
	}
}

// A service that sends one byte after the other does not extend the limit.
func TestAskSlowService(t *testing.T) {
	addr := testhost.Listen(t, func(c net.Conn) {
		testhost.SpeakRAS(c, true, func() string {
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
	_, err := analyze.AskRAS(addr)
	require.ErrorContains(t, err, "i/o timeout")
}

func TestAskWithoutService(t *testing.T) {
	_, err := analyze.AskRASWithin(fmt.Sprint("127.0.0.1:", testhost.Reserve(t)), time.Minute)
	require.ErrorContains(t, err, "connection refused")
	_, err = analyze.AskRAS("not an address")
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
			require.Equal(t, c.want, analyze.RASAddress(c.virtual))
		})
	}
}

func rankName(_ *analyze.RASCommunicator, rank int) string { return fmt.Sprint("rank ", rank) }

func TestFindings(t *testing.T) {
	on := func(pid, allReduces int) testhost.RASRank {
		return testhost.RASRank{Host: "10.0.0.1", PID: pid, AllReduces: allReduces}
	}
	silent, dead, failed := on(3, 0), on(4, 0), on(5, 5)
	silent.Silent, dead.Dead, failed.AsyncError = true, true, 6
	strange := failed
	strange.AsyncError = 12
	for name, c := range map[string]struct {
		ranks []testhost.RASRank
		want  []string
	}{
		"fine":   {[]testhost.RASRank{on(1, 5), on(2, 5)}, nil},
		"silent": {[]testhost.RASRank{on(1, 5), silent}, []string{"rank 1 (process 3 on host 10.0.0.1) does not answer"}},
		"two silent": {[]testhost.RASRank{on(1, 5), silent, silent},
			[]string{"rank 1 (process 3 on host 10.0.0.1), rank 2 (process 3 on host 10.0.0.1) do not answer"}},
		"dead first": {[]testhost.RASRank{silent, dead, on(1, 5), failed}, []string{
			"rank 1 (process 4 on host 10.0.0.1) is dead or unreachable", "rank 0 (process 3 on host 10.0.0.1) does not answer"}},
		"error":        {[]testhost.RASRank{on(1, 5), failed}, []string{"rank 1 (process 5 on host 10.0.0.1) had an asynchronous error: ncclRemoteError"}},
		"other result": {[]testhost.RASRank{strange}, []string{"rank 0 (process 5 on host 10.0.0.1) had an asynchronous error: NCCL error 12"}},
		"behind": {[]testhost.RASRank{on(1, 5), on(2, 4), on(3, 5)},
			[]string{"the ranks have launched different numbers of AllReduce: rank 1 (process 2 on host 10.0.0.1) 4, 2 other ranks 5"}},
		"one ahead": {[]testhost.RASRank{on(1, 4), on(2, 5)},
			[]string{"the ranks have launched different numbers of AllReduce: rank 0 (process 1 on host 10.0.0.1) 4, rank 1 (process 2 on host 10.0.0.1) 5"}},
		"not known": {[]testhost.RASRank{on(1, 5), {Host: "unknown", PID: -1, Silent: true}}, []string{"rank 1 does not answer"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, text := range []string{testhost.RASAnswer(c.ranks...), testhost.RASWithBug2289(testhost.RASAnswer(c.ranks...))} {
				a, err := analyze.DecodeRAS([]byte(text))
				require.NoError(t, err)
				require.Equal(t, c.want, a.Findings(rankName))
			}
		})
	}
}

// An answer of empty objects is not decoded: it would take 100 times its size in memory.
func TestRASAnswerOfManyObjects(t *testing.T) {
	_, err := analyze.DecodeRAS([]byte(`{"nccl_version":"1","communicators":[` + strings.Repeat("{},", 1<<17) + `{}]}`))
	require.ErrorContains(t, err, "ras: the answer has 131074 objects in 393257 bytes of JSON")
}

// A finding of a large communicator names a few ranks.
func TestFindingsOfManyRanks(t *testing.T) {
	ranks := make([]testhost.RASRank, 100)
	for i := range ranks {
		ranks[i] = testhost.RASRank{Host: "10.0.0.1", PID: i + 1, AllReduces: i}
	}
	a, err := analyze.DecodeRAS([]byte(testhost.RASAnswer(ranks...)))
	require.NoError(t, err)
	require.Equal(t, []string{"the ranks have launched different numbers of AllReduce: rank 0 (process 1 on host 10.0.0.1) 0, rank 1 (process 2 on host 10.0.0.1) 1, rank 99 (process 100 on host 10.0.0.1) 99"}, a.Findings(rankName))
	for i := range ranks {
		ranks[i].Silent = i > 0
	}
	a, err = analyze.DecodeRAS([]byte(testhost.RASAnswer(ranks...)))
	require.NoError(t, err)
	require.Regexp(t, `^rank 1 .*, rank 4 \(process 5 on host 10.0.0.1\) and 95 more ranks do not answer$`, a.Findings(rankName)[0])
}

// A process that answers, but has closed its communicator, is not silent.
func TestRankThatHasClosedItsCommunicator(t *testing.T) {
	text := strings.Replace(testhost.RASAnswer(testhost.RASRank{PID: 1}, testhost.RASRank{PID: 2, Silent: true}), `"unresponsive": true`, `"unresponsive": false`, 1)
	a, err := analyze.DecodeRAS([]byte(text))
	require.NoError(t, err)
	require.Len(t, a.Communicators[0].Missing, 1)
	require.Empty(t, a.Findings(rankName))
}

// The answer may be of another job, or have other communicators of the process.
func TestOf(t *testing.T) {
	a, err := analyze.DecodeRAS([]byte(testhost.RASAnswer(testhost.RASRank{PID: 7}, testhost.RASRank{PID: 8, Silent: true})))
	require.NoError(t, err)
	for name, c := range map[string]struct {
		rank, size, pid, want int
	}{
		"mine": {0, 2, 7, 1}, "missing": {1, 2, 8, 1}, "other process": {0, 2, 9, 0}, "other rank": {1, 2, 7, 0}, "other size": {0, 3, 7, 0},
	} {
		require.Len(t, a.Of(c.rank, c.size, c.pid).Communicators, c.want, name)
	}
}

func TestDecodeRefuses(t *testing.T) {
	fine := testhost.RASAnswer(testhost.RASRank{Host: "10.0.0.1", PID: 1}, testhost.RASRank{Host: "10.0.0.2", PID: 2})
	for name, c := range map[string]struct{ old, new, want string }{
		"list":           {fine, "[]", "not JSON of NCCL's RAS service"},
		"other":          {fine, `{"nccl_version": "2.29.2"}`, `has no "communicators"`},
		"truncated":      {"  }\n}\n", "", "unexpected EOF"},
		"more":           {"  }\n}\n", "  }\n}\n{}", "more bytes follow"},
		"size":           {`"size": 2`, `"size": 0`, "it has 0 ranks: want 1 to"},
		"large":          {`"size": 2`, `"size": 2000000000`, "it has 2000000000 ranks"},
		"rank":           {`"rank": 1`, `"rank": 2`, "it has 2 ranks, and one of them is 2"},
		"negative":       {`"rank": 1`, `"rank": -1`, "one of them is -1"},
		"twice":          {`"rank": 1`, `"rank": 0`, "rank 0 occurs twice"},
		"negative count": {`"AllReduce": 0`, `"AllReduce": -1`, "number -1"},
		"kind":           {`"AllReduce": 0`, `"\u001b[2J": 0`, `counts of "\x1b[2J"`},
		"many kinds":     {`"AllReduce": 0`, manyKinds(65), "rank 0 has 69 kinds of operations: want at most 64"},
		"host":           {`10.0.0.2`, strings.Repeat("x", 65), "the host of rank 1 has 65 bytes"},
		"hash":           {`0x5c1d8d1a3f0b2c44`, strings.Repeat("x", 65), "its hash has 65 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := analyze.DecodeRAS([]byte(strings.Replace(fine, c.old, c.new, 1)))
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "\x1b")
		})
	}
}

func manyKinds(n int) string {
	var texts []string
	for i := range n {
		texts = append(texts, fmt.Sprintf(`"Kind%d": 0`, i))
	}
	return strings.Join(texts, ", ")
}

// Texts of an answer cannot control the terminal.
func TestFindingsQuoteTexts(t *testing.T) {
	a, err := analyze.DecodeRAS([]byte(testhost.RASAnswer(testhost.RASRank{Host: `\u001b[2J`, PID: 1, Silent: true})))
	require.NoError(t, err)
	require.Equal(t, []string{`rank 0 (process 1 on host \x1b[2J) does not answer`}, a.Findings(rankName))
}

// FuzzDecode reads answers of any program that listens on the port.
func FuzzDecodeRAS(f *testing.F) {
	silent := testhost.RASRank{Host: "10.0.0.2", PID: 2, Silent: true}
	for _, ranks := range [][]testhost.RASRank{nil, {{PID: 1}}, {{PID: 1, AllReduces: 2}, {PID: 2, AsyncError: 3}, silent}} {
		f.Add([]byte(testhost.RASAnswer(ranks...)))
	}
	f.Add([]byte(testhost.RASWithBug2289(testhost.RASAnswer(silent))))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := analyze.DecodeRAS(b)
		if err != nil {
			return
		}
		for _, text := range a.Findings(rankName) {
			require.NotContains(t, text, "\x1b")
			require.NotContains(t, text, "\n")
			require.Less(t, len(text), 4096)
		}
	})
}
