package job

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// FuzzLink feeds a link what comes behind the handshake.
func FuzzLink(f *testing.F) {
	f.Add([]byte{0, 0, 0, 17, 1})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add(make([]byte, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, c := net.Pipe()
		defer c.Close()
		go func() {
			_, _ = a.Write(b)
			a.Close()
		}()
		aead, err := frameCipher(make([]byte, KeyBytes), nil, "fuzz")
		require.NoError(t, err)
		l := &Link{Conn: c, Seal: aead, Open: aead}
		for err == nil {
			_, err = l.Read()
		}
	})
}

// FuzzHistory reads what an agent tells a coordinator, and what a coordinator tells agents.
func FuzzHistory(f *testing.F) {
	f.Add([]byte(`{"run":"r","term":2,"epoch":3,"voters":["a","b"],"proposed":[{"epoch":4,"voters":["a"]}],"plan":{"hosts":[{"uuid":"a"},{"uuid":"b"}]},"members":[{"node":1}],"ledger":{"used":1,"restarts":[{"agent":"a","total":1}]}}`))
	f.Add([]byte(`{"epoch":1,"voters":["a","a"],"members":[{"node":7}]}`))
	f.Add([]byte(`{"by":{"term":3,"agent":"a"},"plan":{"hosts":[{"uuid":"a"}]},"members":[{"node":-1}],"voters":["b"]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c history
		if json.Unmarshal(b, &c) == nil && c.check() == nil {
			for _, m := range c.Members {
				require.GreaterOrEqual(t, m.Node, 0)
				_ = c.hostOf(m)
			}
			o := c
			c.merge(&o)
			require.GreaterOrEqual(t, c.last(), c.Epoch)
			require.LessOrEqual(t, len(c.voterSets()), 1+len(o.Proposed))
			_, _ = c.addresses(), c.isPossible()
			require.Empty(t, c.open(c.last()))
		}
		var n news
		if json.Unmarshal(b, &n) == nil && n.check() == nil {
			a := &Agent{UUID: "a", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
			a.Now.Store(&attempt{})
			if a.news(FirstEpoch, n) == nil && a.history != nil {
				require.GreaterOrEqual(t, a.promise().Term, n.By.Term)
			}
			_ = a.news(FirstEpoch, n)
		}
	})
}

// FuzzStore gives the engine calls of two ranks, and compares what it keeps with what it charges.
func FuzzStore(f *testing.F) {
	f.Add([]byte{1, 'a', 3, 'b', 6, 'a', 3, 'a', 7, 'x', 9, 'a'})
	f.Fuzz(func(t *testing.T, b []byte) {
		e := newEngine(2, new(atomic.Int64))
		for i := 0; i+1 < len(b); i += 2 {
			at, key := ticket{int(b[i]) / 20 % 2, uint64(i)}, b[i+1:i+2]
			c := Call{Op: b[i] % 20, N: int64(int8(b[i+1])), Fields: [][]byte{key}}
			switch c.Op {
			case OpSet:
				c.Fields = append(c.Fields, bytes.Repeat(key, int(b[i])))
			case OpSwap:
				c.Fields = append(c.Fields, nil, key)
			case OpSetAll, OpAppend:
				c.Fields = append(c.Fields, bytes.Repeat(key, int(b[i])))
			case OpWait, OpGetAll, OpHas:
				c.Fields = append(c.Fields, b[:i])
			case OpCount:
				c.Fields = nil
			case 19:
				e.cancel(ticket{0, uint64(b[i+1])})
				continue
			}
			e.do(at, c, func(r Call) { require.True(t, r.Op != StatusOK || c.Op != OpGetAll || len(r.Fields) > 0) })
		}
		require.Equal(t, charged(e), e.total())
		e.dropRank(0)
		e.dropRank(1)
		require.Equal(t, charged(e), e.total())
	})
}

// FuzzIsStopped reads /proc/<pid>/stat of a process with any name.
func FuzzIsStopped(f *testing.F) {
	f.Add([]byte("a"), byte('T'))
	f.Add([]byte(") T ("), byte('S'))
	f.Fuzz(func(t *testing.T, name []byte, state byte) {
		stat := append(append([]byte("12 ("), name...), ')', ' ', state)
		require.Equal(t, state == 'T' || state == 't', parseStat(append(stat, " 1 1"...)).IsStopped())
		_ = parseStat(name)
	})
}

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
