package job

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// noiseText returns a text that does not compress well.
func noiseText(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return base64.StdEncoding.EncodeToString(b)[:n]
}

// The texts of many processes are clipped until one message can carry them.
func TestLongTextsOfManyProcesses(t *testing.T) {
	w := World{}
	for i := range 3000 {
		w.Left = append(w.Left, Departure{Member: Member{Rank: i, Host: "h", PID: i}, Reason: noiseText(3000)})
	}
	m := Note(KindWorld, w)
	require.LessOrEqual(t, m.bytes(), maxMessageBytes)
	var got World
	require.NoError(t, m.Record(&got))
	require.Len(t, got.Left, len(w.Left))
	require.Equal(t, w.Left[7].Member, got.Left[7].Member)
	require.True(t, strings.HasPrefix(w.Left[7].Reason, got.Left[7].Reason[:100]))
	require.Len(t, w.Left[7].Reason, 3000, "the caller's record is unchanged")

	m = Note(kindNote, Fault{Reason: strings.Repeat("\xff", MaxText)}) // each byte is escaped by four
	var f Fault
	require.NoError(t, m.Record(&f))
	require.LessOrEqual(t, len(f.Reason), MaxText)
}

// The coordinator does not decode a long record of a worker.
func TestRecordsOfWorkersAreSmall(t *testing.T) {
	m := Note(KindFailed, Fault{Reason: "x"})
	m.Body = append(m.Body[:len(m.Body)-1], []byte(`,"more":"`+strings.Repeat(noiseText(maxWorkerRecord/8), 9)+`"}`)...)
	var f Fault
	require.NoError(t, m.Record(&f))
	m.fromWorker = true
	require.ErrorContains(t, m.Record(&f), "want at most 65536")
	m.Body = Pack(m.Body)
	require.Less(t, len(m.Body), maxWorkerRecord/2)
	require.ErrorContains(t, m.Record(&f), "has more than 65536 bytes")
}

// A message that no frame can carry ends the stream with a reason. It is not repeated on another link.
func TestUnwritableMessage(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	s := NewStream(&Link{Conn: a}, NewRunClock(time.Second), time.Minute)
	s.renew = func(error) (renewal, error) {
		t.Error("asks for another link")
		return renewal{}, errStreamClosed
	}
	s.send(Message{Kind: kindNews, Epoch: FirstEpoch, Body: make([]byte, maxMessageBytes)})
	_, err := s.read()
	require.ErrorIs(t, err, ErrTooLarge)
	require.ErrorContains(t, err, fmt.Sprintf("a message of %d bytes", maxMessageBytes+messageHeadBytes))
	require.True(t, s.isClosed())
}

// One worker cannot end the job by a least size that no world has.
func TestLeastSizeOfOneWorker(t *testing.T) {
	of := func(least ...int) int {
		var ps []*peer
		for _, n := range least {
			ps = append(ps, &peer{reg: Registration{Least: n}})
		}
		return leastSize(ps)
	}
	require.Equal(t, 1, of())
	require.Equal(t, 2, of(2, 1<<30))
	require.Equal(t, 3, of(3, 3, 1<<30))
	require.Equal(t, 3, of(3, -1, 3))
	require.Equal(t, 1, of(0))
}

// Numbers of hosts and processes that no job has are mistakes.
func TestSizesOfJobs(t *testing.T) {
	for want, cfg := range map[string]*Config{
		"a job on 1048577 hosts: want at most 1048576":                             {Nodes: MaxSize + 1},
		"4097 processes on this host: want at most 4096":                           {LocalSize: maxLocalSize + 1},
		"4096 processes on each of 257 hosts: a job has at most 1048576 processes": {Nodes: 257, LocalSize: maxLocalSize},
	} {
		_, _, err := cfg.Complete()
		require.ErrorAs(t, err, new(*ConfigError))
		require.ErrorContains(t, err, want)
	}
}

// A link that comes after the last message is closed, because nobody would end it: the reader would wait for ever.
func TestNoLinkAfterTheLastMessage(t *testing.T) {
	for _, late := range []bool{false, true} { // the reader has already taken it
		first, _ := net.Pipe()
		second, peer := net.Pipe()
		s := NewStream(&Link{Conn: first}, NewRunClock(time.Second), time.Minute)
		next := renewal{link: &Link{Conn: second}}
		s.closeAfterQueue()
		if !late {
			s.mu.Lock()
			s.renewals <- next
			s.mu.Unlock()
		}
		s.writeLoop()
		if late {
			require.ErrorIs(t, s.adopt(next), errStreamClosed)
		}
		_, err := peer.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		third, peer := net.Pipe()
		s.replaceBy(renewal{link: &Link{Conn: third}})
		_, err = peer.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
	}
}
