package cluster

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
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

// Errors of any length end an epoch like short ones, also those of a worker that does not clip them itself.
func TestLongErrorsOfWorkers(t *testing.T) {
	t.Parallel()
	cfg := oneHost(4, 0)
	lines := make(chan string, 100)
	cfg.Notify = func(line string) { lines <- line }
	as, errs := startAll(t, cfg)
	require.NoError(t, errors.Join(errs...))
	rs := []*ran{runWorker(t, as[0], 0, RunConfig{}), runWorker(t, as[0], 1, RunConfig{}), runWorker(t, as[0], 2, RunConfig{})}
	boom := errors.New(noiseText(1_900_000))
	j, err := detect(environ(strings.Join(as[0].WorkerEnv(3), " ")))
	require.NoError(t, err)
	failed := make(chan error, 1)
	go func() {
		failed <- Run(t.Context(), &RunConfig{Join: j}, func(context.Context, *World) error { return boom })
	}()
	rs[0].world(t, 1)
	ws := []*World{rs[1].world(t, 1), rs[2].world(t, 1)}
	w := rs[0].world(t, 2)
	require.Len(t, w.Left(), 1)
	require.Regexp(t, `^its function failed: [A-Za-z0-9+/]+\.\.\. \(\d+ more bytes\)$`, w.Left()[0].Reason)
	require.InDelta(t, maxText-20, len(w.Left()[0].Reason), 20)
	require.ErrorIs(t, <-failed, boom)

	ws[0], ws[1] = rs[1].world(t, 2), rs[2].world(t, 2)
	var bodies [2][]byte // made before the first is sent: a message of an epoch that has ended has no effect
	for i := range bodies {
		record, err := json.Marshal(fault{Reason: noiseText(1_900_000)})
		require.NoError(t, err)
		bodies[i] = pack(record)
	}
	for i, w := range ws { // two at once, as in one change
		require.NoError(t, w.calls.(remote).k.send(message{kind: kindFailed, epoch: 2, body: bodies[i]}))
	}
	w = rs[0].awaitSize(t, 1)
	for _, d := range w.Left() {
		require.LessOrEqual(t, len(d.Reason), maxText)
	}
	require.Error(t, rs[1].returned(t))
	require.Error(t, rs[2].returned(t))
	finishAll(t, as, rs[0])
	for len(lines) > 0 {
		require.Less(t, len(<-lines), 2*maxText)
	}
}

// The texts of many processes are clipped until one message can carry them.
func TestLongTextsOfManyProcesses(t *testing.T) {
	w := world{}
	for i := range 3000 {
		w.Left = append(w.Left, Departure{Member: Member{Rank: i, Host: "h", PID: i}, Reason: noiseText(3000)})
	}
	m := note(kindWorld, w)
	require.LessOrEqual(t, m.bytes(), maxMessageBytes)
	var got world
	require.NoError(t, m.record(&got))
	require.Len(t, got.Left, len(w.Left))
	require.Equal(t, w.Left[7].Member, got.Left[7].Member)
	require.True(t, strings.HasPrefix(w.Left[7].Reason, got.Left[7].Reason[:100]))
	require.Len(t, w.Left[7].Reason, 3000, "the caller's record is unchanged")

	m = note(kindNote, fault{Reason: strings.Repeat("\xff", maxText)}) // each byte is escaped by four
	var f fault
	require.NoError(t, m.record(&f))
	require.LessOrEqual(t, len(f.Reason), maxText)
}

// The coordinator does not decode a long record of a worker.
func TestRecordsOfWorkersAreSmall(t *testing.T) {
	m := note(kindFailed, fault{Reason: "x"})
	m.body = append(m.body[:len(m.body)-1], []byte(`,"more":"`+strings.Repeat(noiseText(maxWorkerRecord/8), 9)+`"}`)...)
	var f fault
	require.NoError(t, m.record(&f))
	m.fromWorker = true
	require.ErrorContains(t, m.record(&f), "want at most 65536")
	m.body = pack(m.body)
	require.Less(t, len(m.body), maxWorkerRecord/2)
	require.ErrorContains(t, m.record(&f), "has more than 65536 bytes")
}

// A message that no frame can carry ends the stream with a reason. It is not repeated on another link.
func TestUnwritableMessage(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	s := newStream(&link{c: a}, newRunClock(time.Second), time.Minute)
	s.renew = func(error) (renewal, error) {
		t.Error("asks for another link")
		return renewal{}, errStreamClosed
	}
	s.send(message{kind: kindNews, epoch: firstEpoch, body: make([]byte, maxMessageBytes)})
	_, err := s.read()
	require.ErrorIs(t, err, ErrTooLarge)
	require.ErrorContains(t, err, fmt.Sprintf("a message of %d bytes", maxMessageBytes+messageHeadBytes))
	require.True(t, s.isClosed())
}

// A world that waits for its least size ends after the limit, although a process comes and goes meanwhile.
func TestNewcomersDoNotExtendTheWait(t *testing.T) {
	t.Parallel()
	cfg := oneHost(3, 100)
	cfg.Timing.Join, cfg.Timing.Revoke = 2*time.Second, time.Second
	as, errs := startAll(t, cfg)
	require.NoError(t, errors.Join(errs...))
	rc := RunConfig{MinSize: 3}
	rs := []*ran{runWorker(t, as[0], 0, rc), runWorker(t, as[0], 1, rc), runWorker(t, as[0], 2, rc)}
	rs[0].world(t, 1)
	w1, w2 := rs[1].world(t, 1), rs[2].world(t, 1)
	rs[1].kill(t, w1)
	rs[2].kill(t, w2)
	j, err := detect(environ(strings.Join(as[0].WorkerEnv(1), " ")))
	require.NoError(t, err)
	j.Notify = func(string) {}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	flapped := make(chan int)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			once, stop := context.WithTimeout(ctx, 300*time.Millisecond)
			_ = Run(once, &RunConfig{Join: j, MinSize: 3}, func(context.Context, *World) error { return nil })
			stop()
		}
		flapped <- n
	}()
	select {
	case err := <-rs[0].result:
		require.ErrorContains(t, err, "not enough processes for")
	case <-ctx.Done():
		t.Error("the process waits for ever")
	}
	cancel()
	require.Positive(t, <-flapped)
}

// One worker cannot end the job by a least size that no world has.
func TestLeastSizeOfOneWorker(t *testing.T) {
	of := func(least ...int) int {
		var ps []*peer
		for _, n := range least {
			ps = append(ps, &peer{reg: registration{Least: n}})
		}
		return leastSize(ps)
	}
	require.Equal(t, 1, of())
	require.Equal(t, 2, of(2, 1<<30))
	require.Equal(t, 3, of(3, 3, 1<<30))
	require.Equal(t, 3, of(3, -1, 3))
	require.Equal(t, 1, of(0))
}
