package job

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// FuzzEvents gives a launcher messages that a coordinator may send.
func FuzzEvents(f *testing.F) {
	add := func(k Kind, id uint64, v any) {
		m := Note(k, v)
		m.ID = id
		f.Add(m.Encode())
	}
	members := []Member{{Rank: 0, Host: "a"}, {Rank: 1, Host: "b", Node: 1}}
	add(kindOrder, 0, Order{Local: 1, Start: true})
	add(kindOrder, 0, Order{Local: -1, Kill: true})
	add(kindNews, 0, news{Plan: plan{Hosts: []host{{UUID: "u", LocalSize: 2}}}, Members: members, Line: "epoch 2"})
	add(KindFault, 0, Fault{Rank: -1, Again: true})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeMessage(b)
		if err != nil {
			return
		}
		l, _ := net.Pipe()
		k := &Client{Stream: NewStream(&Link{Conn: l}, NewRunClock(time.Second), time.Second), Clock: NewRunClock(time.Second),
			replies: map[uint64]chan Message{}, EndedC: make(chan struct{})}
		k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
		a := &Agent{UUID: "u", cfg: Config{LocalSize: 2, Notify: func(string) {}}, orders: make(chan Order, 1), voter: newVoter(2), life: t.Context()}
		p, err := a.newAttempt(k, 1, plan{Hosts: []host{{UUID: "u", LocalSize: 2}}})
		require.NoError(t, err)
		a.adopt(p)
		a.event(k, m)
		_, _, _ = a.Rank(0), a.Size(), a.Context()
	})
}
