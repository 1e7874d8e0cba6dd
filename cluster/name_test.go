package cluster

import (
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// forged is a name that prints a line as the launcher's own.
const forged = "a\r\x1b[Kchorus: all is well\n"

// TestForgedNames registers with names that a terminal would obey, as a member could that
// has the secret.
func TestForgedNames(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var lines []string
	as, errs := startAll(t, func() []*Config {
		cs := onLoopback(t, 2, 2)
		for _, c := range cs {
			c.Notify = func(line string) {
				mu.Lock()
				defer mu.Unlock()
				lines = append(lines, line)
			}
		}
		return cs
	}()...)
	for _, err := range errs {
		require.NoError(t, err)
	}
	for _, m := range []message{
		{kind: kindRegister, id: registerAgent, body: note(0, host{Host: forged, UUID: "u", Nodes: 2, LocalSize: 1, NodeRank: -1}).body},
		{kind: kindRegister, id: registerWorker, body: note(0, registration{Member: Member{Rank: 1, Host: forged, PID: 7}}).body},
		{kind: kindRegister, id: registerWorker, body: note(0, registration{Member: Member{Rank: 1, Host: "b", Name: strings.Repeat("n", maxNameBytes+1)}}).body},
	} {
		m.epoch = firstEpoch
		l, _ := target{job: as[0].Job(), addr: as[0].addr, key: as[0].keys.control}.persist(t)
		require.NoError(t, l.write(frame{body: m.encode()}, time.Minute))
		answer, _, err := l.readMessage(time.Minute)
		require.NoError(t, err)
		require.Equal(t, kindRefuse, answer.kind)
		var r refusal
		require.NoError(t, answer.record(&r))
		require.Contains(t, r.Reason, "the name of the host or process")
		l.close()
	}
	mu.Lock()
	defer mu.Unlock()
	require.NotEmpty(t, lines)
	require.False(t, slices.ContainsFunc(lines, func(l string) bool { return strings.ContainsAny(l, "\r\n\x1b") }), "%q", lines)
}

func TestNames(t *testing.T) {
	for _, bad := range []string{"a\nb", "\x1b[2J", "a\\x0a", "\u202e", strings.Repeat("x", 256)} {
		_, err := Start(t.Context(), &Config{Host: bad})
		require.ErrorContains(t, err, "the name of the host")
		_, err = Start(t.Context(), &Config{Job: bad})
		require.ErrorContains(t, err, "the name of the job")
		_, err = Join(t.Context(), &JoinConfig{Name: bad})
		require.ErrorContains(t, err, "the name of the process")
		require.False(t, strings.ContainsAny(err.Error(), "\n\x1b"))
	}
	s, err := Join(t.Context(), &JoinConfig{Host: "node 1 (é)", Name: "x"})
	require.NoError(t, err)
	require.NoError(t, s.Close())
}

// Every text of every record is quoted when it comes, wherever it is.
func TestRecordsAreQuoted(t *testing.T) {
	m := Member{Host: forged, Name: forged}
	for _, v := range []any{
		&registration{Member: m}, &host{Host: forged, UUID: forged, MasterAddr: forged}, &welcome{Host: forged}, &world{Members: []Member{m, m}},
		&plan{Hosts: []host{{Host: forged}}}, &fault{Host: forged, Reason: forged},
		&refusal{Reason: forged, Place: forged, First: &m, Attendance: &attendance{Unit: forged, Have: []Member{m}}}, &Exit{Host: forged, Reason: forged},
	} {
		got := reflect.New(reflect.TypeOf(v).Elem()).Interface()
		require.NoError(t, note(kindFault, v).record(got))
		text := string(note(kindFault, got).body)
		require.NotContains(t, text, `\n`+`"`)
		require.NotContains(t, text, `\u001b`)
		require.Contains(t, text, `\\x1b`)
	}
	meta, err := decodeMeta(gossipMeta{Tag: "t", UUID: "u", Host: forged}.encode())
	require.NoError(t, err)
	require.NotContains(t, meta.Host, "\r")
}

func TestInsecureIsTold(t *testing.T) {
	var lines []string
	addr := freeAddr(t)
	s, err := Join(t.Context(), &JoinConfig{Job: t.Name(), Size: 1, Rank: new(0), Addr: addr, Serve: true, Insecure: true, Timing: quick,
		Notify: func(line string) { lines = append(lines, line) }})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.Contains(t, lines, insecure)
	c := &Config{Job: "j", Nodes: 2, Seeds: []string{"a"}, Insecure: true, Notify: func(line string) { lines = append(lines, line) }}
	lines = nil
	_, _, err = c.complete()
	require.NoError(t, err)
	require.Equal(t, []string{insecure}, lines)
}
