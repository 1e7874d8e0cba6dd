package job

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
	for _, m := range []Message{
		{Kind: kindRegister, ID: registerAgent, Body: Note(0, host{Host: forged, UUID: "u", Nodes: 2, LocalSize: 1, NodeRank: -1}).Body},
		{Kind: kindRegister, ID: RegisterWorker, Body: Note(0, Registration{Member: Member{Rank: 1, Host: forged, PID: 7}}).Body},
		{Kind: kindRegister, ID: RegisterWorker, Body: Note(0, Registration{Member: Member{Rank: 1, Host: "b", Name: strings.Repeat("n", maxNameBytes+1)}}).Body},
	} {
		m.Epoch = FirstEpoch
		l, _ := Target{Job: as[0].Job(), Addr: as[0].Addr, Key: as[0].keys.Control}.persist(t)
		require.NoError(t, l.Write(Frame{Body: m.Encode()}, time.Minute))
		answer, _, err := l.readMessage(time.Minute)
		require.NoError(t, err)
		require.Equal(t, KindRefuse, answer.Kind)
		var r Refusal
		require.NoError(t, answer.Record(&r))
		require.Contains(t, r.Reason, "the name of the host or process")
		l.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	require.NotEmpty(t, lines)
	require.False(t, slices.ContainsFunc(lines, func(l string) bool { return strings.ContainsAny(l, "\r\n\x1b") }), "%q", lines)
}

// Every text of every record is quoted when it comes, wherever it is.
func TestRecordsAreQuoted(t *testing.T) {
	m := Member{Host: forged, Name: forged}
	for _, v := range []any{
		&Registration{Member: m}, &host{Host: forged, UUID: forged, MasterAddr: forged}, &Welcome{Host: forged}, &World{Members: []Member{m, m}},
		&plan{Hosts: []host{{Host: forged}}}, &Fault{Host: forged, Reason: forged},
		&Refusal{Reason: forged, Place: forged, First: &m, Attendance: &attendance{Unit: forged, Have: []Member{m}}}, &Exit{Host: forged, Reason: forged},
	} {
		got := reflect.New(reflect.TypeOf(v).Elem()).Interface()
		require.NoError(t, Note(KindFault, v).Record(got))
		text := string(Note(KindFault, got).Body)
		require.NotContains(t, text, `\n`+`"`)
		require.NotContains(t, text, `\u001b`)
		require.Contains(t, text, `\\x1b`)
	}
	meta, err := decodeMeta(gossipMeta{Tag: "t", UUID: "u", Host: forged}.encode())
	require.NoError(t, err)
	require.NotContains(t, meta.Host, "\r")
}
