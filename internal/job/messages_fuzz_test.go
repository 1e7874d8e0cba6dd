package job

import (
	"context"
	"math"
	"math/rand/v2"
	"net"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A composer composes messages that a hostile or broken member may send.
type composer struct{ *rand.Rand }

// record returns a random record of the type of v.
func (r composer) record(v any) any {
	x := reflect.New(reflect.TypeOf(v))
	r.fill(x.Elem(), 0)
	return x.Interface()
}

func (r composer) fill(v reflect.Value, depth int) {
	if r.IntN(5) == 0 {
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				r.fill(v.Field(i), depth+1)
			}
		}
	case reflect.Pointer:
		if depth < 6 {
			v.Set(reflect.New(v.Type().Elem()))
			r.fill(v.Elem(), depth+1)
		}
	case reflect.Slice:
		if depth < 7 {
			v.Set(reflect.MakeSlice(v.Type(), r.IntN(4), 4))
			for i := range v.Len() {
				r.fill(v.Index(i), depth+1)
			}
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range r.IntN(3) {
			k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			r.fill(k, depth+1)
			r.fill(e, depth+1)
			v.SetMapIndex(k, e)
		}
	case reflect.String:
		texts := []string{"", "a", "b", "c", "d", "a:1", "another run", "\x1b[2J", strings.Repeat("x", 300)}
		v.SetString(texts[r.IntN(len(texts))])
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case reflect.Int, reflect.Int64:
		ns := []int64{-1, 0, 1, 2, 3, 100, 101, 102, 5000, math.MaxInt64, math.MinInt64, int64(time.Second)}
		v.SetInt(ns[r.IntN(len(ns))])
	case reflect.Uint8:
		v.SetUint(uint64(r.IntN(256)))
	case reflect.Uint64:
		v.SetUint(r.number())
	}
}

func (r composer) number() uint64 {
	ns := []uint64{0, 1, 2, 3, 4, 5, math.MaxUint64, math.MaxInt64}
	return ns[r.IntN(len(ns))]
}

// message returns a message of any kind, whose record may be of another kind.
func (r composer) message(records []any) Message {
	m := Message{Kind: Kind(1 + r.IntN(int(kindLast)-1)), Epoch: max(r.number(), FirstEpoch), ID: r.number()}
	if r.IntN(8) == 0 {
		return m
	}
	m.Body = Pack(marshalRecord(r.record(records[r.IntN(len(records))])))
	if r.IntN(20) == 0 && len(m.Body) > 0 {
		m.Body[r.IntN(len(m.Body))] ^= byte(1 + r.IntN(255))
	}
	return m
}

// toCoordinator are the records that a coordinator receives.
var toCoordinator = map[Kind][]any{
	kindRegister: {Registration{}, host{}}, kindElsewhere: {elsewhere{}}, kindExit: {Exit{}}, kindStop: {Fault{}}, kindDrain: {Fault{}}, KindFailed: {Fault{}}, kindPath: {pathReport{}},
}

// FuzzMessages lets members of a job send to its coordinator what they may not, and time pass. No message ends the coordinator's process.
func FuzzMessages(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := composer{rand.New(rand.NewPCG(seed, 1))}
		var j *paperJob
		switch r.IntN(4) {
		case 0:
			j = newPaperJob("a", "b", "c")
		case 1:
			j = completePaperJob("a", "b", "c")
		case 2: // without launchers
			j = onPaper(CoordConfig{Size: 3, Registry: r.IntN(2) == 0, JoinBy: time.Hour, Self: Welcome{LostAfter: time.Second}})
		default: // before the hosts are complete
			j = onPaper(CoordConfig{agents: 3, least: 1 + r.IntN(3), JoinBy: time.Hour, RevokeBy: time.Minute, DrainBy: time.Minute, again: restartPolicy{most: r.IntN(3)}, Self: Welcome{Agent: "a", Host: "a", LostAfter: time.Second}})
		}
		var ps []*peer
		for _, p := range j.hosts {
			ps = append(ps, p)
		}
		for _, p := range j.procs {
			ps = append(ps, p)
		}
		for range 300 {
			switch r.IntN(10) {
			case 0:
				p := &peer{addr: "10.0.0.1", worker: r.IntN(2) == 0}
				require.NoError(t, j.happen(connected{p}))
				ps = append(ps, p)
			case 1:
				j.sleep([]time.Duration{time.Millisecond, SettleTime, ExitGrace, 10 * time.Second, time.Hour}[r.IntN(5)])
			case 2:
				if len(ps) > 0 {
					i := r.IntN(len(ps))
					require.NoError(t, j.happen(disconnected{ps[i], ending{closed: r.IntN(2) == 0, found: finding(r.IntN(3)), certain: r.IntN(2) == 0, reason: "it burned"}}))
					ps = append(ps[:i], ps[i+1:]...)
				}
			case 3:
				require.NoError(t, j.happen(probed{map[string]bool{"a": r.IntN(2) == 0, "b": r.IntN(2) == 0}}))
			default:
				if len(ps) == 0 {
					continue
				}
				kinds := []Kind{kindRegister, kindElsewhere, kindExit, kindStop, kindDrain, KindFailed, kindPath, kindVote, kindAccepted, KindPrepared, kindDone, kindLeave, KindSilent, kindKill, kindReady, KindRevoked, KindFinished, KindHeld, kindRecorded}
				m := Message{Kind: kinds[r.IntN(len(kinds))], Epoch: []uint64{1, j.epoch, j.epoch + 1, math.MaxUint64}[r.IntN(4)], ID: r.number()}
				if e := j.elastic; e != nil && r.IntN(2) == 0 {
					m.ID = e.try
				}
				if vs := toCoordinator[m.Kind]; vs != nil {
					i := r.IntN(len(vs))
					if m.Kind == kindRegister {
						m.ID = uint64(i)
					}
					v := r.record(vs[i])
					if h, ok := v.(*host); ok && r.IntN(2) == 0 {
						h.Nodes, h.MinNodes, h.Restarts, h.LocalSize = j.cfg.agents, j.cfg.leastHosts(), j.cfg.again.most, 1
					}
					if g, ok := v.(*Registration); ok && r.IntN(2) == 0 {
						g.Elastic, g.Epoch, g.Size, g.Peers, g.Enlists = true, 0, 0, "", j.cfg.Registry
					}
					m.Body = Pack(marshalRecord(v))
				}
				p := ps[r.IntN(len(ps))]
				m.fromWorker = p.worker
				if err := j.handle(p, m); err != nil && r.IntN(2) == 0 {
					require.NoError(t, j.happen(disconnected{p, ending{reason: err.Error()}}))
				}
			}
		}
		for p := range j.queues {
			for _, m := range j.take(p) {
				require.LessOrEqual(t, m.bytes(), maxMessageBytes)
			}
		}
		j.sleep(2 * time.Hour)
	})
}

// FuzzNews gives a launcher and its voter records of every kind that a coordinator sends.
func FuzzNews(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed)
	}
	records := []any{Welcome{}, World{}, plan{}, Fault{}, Refusal{}, attendance{}, Order{}, news{}, handover{}, elsewhere{}, Leader{}}
	of := map[Kind]any{KindWorld: World{}, kindPlan: plan{}, KindFault: Fault{}, KindRefuse: Refusal{}, kindOrder: Order{}, kindNews: news{}, kindLedger: news{}, KindPropose: news{}, kindHandover: handover{}, kindElsewhere: elsewhere{}, kindRequestVote: Leader{}, kindNote: Fault{}, KindRevoke: Fault{}}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := composer{rand.New(rand.NewPCG(seed, 2))}
		l, _ := net.Pipe()
		k := &Client{Stream: NewStream(&Link{Conn: l}, NewRunClock(time.Second), time.Second), Clock: NewRunClock(time.Second),
			replies: map[uint64]chan Message{}, EndedC: make(chan struct{})}
		k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
		k.open, k.shut = context.WithCancel(t.Context())
		a := &Agent{UUID: "a", cfg: Config{LocalSize: 2, Notify: func(string) {}}, orders: make(chan Order, 1), killed: make(chan struct{}), voter: newVoter(2), life: t.Context()}
		p, err := a.newAttempt(k, 1, plan{Hosts: []host{{UUID: "a", LocalSize: 2}}})
		require.NoError(t, err)
		a.adopt(p)
		k.events = func(k *Client, m Message) {
			if m.Kind != kindPlan || r.IntN(4) == 0 {
				a.event(k, m)
			}
		}
		for range 30 {
			m := r.message(records)
			if v, ok := of[m.Kind]; ok && r.IntN(4) > 0 {
				m.Body = Pack(marshalRecord(r.record(v)))
			}
			k.dispatch(m)
			_, _, _ = a.Rank(0), a.Size(), a.Context()
			select {
			case <-a.orders:
			default:
			}
		}
	})
}

// FuzzCalls lets two ranks call the store with any operation and fields.
func FuzzCalls(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := composer{rand.New(rand.NewPCG(seed, 3))}
		var stored atomic.Int64
		e := newEngine(2, &stored)
		for i := range 300 {
			c := Call{Op: byte(r.IntN(24)), N: int64(r.number())}
			for range r.IntN(5) {
				var b []byte
				switch r.IntN(4) {
				case 0:
				case 1:
					b = []byte{byte('a' + r.IntN(3))}
				case 2:
					b = make([]byte, r.IntN(2000))
				default:
					b = []byte("0123")[:r.IntN(5)]
				}
				c.Fields = append(c.Fields, b)
			}
			if r.IntN(6) == 0 {
				e.cancel(ticket{r.IntN(2), uint64(r.IntN(i + 1))})
			}
			e.do(ticket{r.IntN(2), uint64(i)}, c, func(Call) {})
			require.Equal(t, charged(e), e.total())
			require.Less(t, stored.Load(), int64(MaxStoreBytes))
		}
	})
}
