package job

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestHostileSessions lets processes that have a worker's token, or the secret, send messages of every kind in a valid session to a
// coordinator whose job runs: malformed, repeated, reordered and contradicting ones. The job goes on.
func TestHostileSessions(t *testing.T) {
	for _, elastic := range []bool{false, true} {
		t.Run(fmt.Sprintf("elastic %t", elastic), func(t *testing.T) {
			t.Parallel()
			as, errs := startAll(t, onLoopback(t, 2, 1)...)
			require.NoError(t, errors.Join(errs...))
			worker, err := as[0].keys.Control.forWorkers(as[0].promise().Run)
			require.NoError(t, err)
			to := Target{Job: as[0].Job(), Addr: as[0].Addr, Key: worker}
			begun := make(chan struct{}, 8)
			ks := make([]*Client, 3)
			for rank := range ks {
				l, hello := to.persist(t)
				a := as[min(rank, 1)]
				reg := Registration{Member: Member{Rank: rank, LocalRank: max(rank-1, 0), LocalSize: 1 + min(rank, 1), Node: min(rank, 1), Host: a.cfg.Host, PID: os.Getpid()}, Size: 3}
				if reg.Elastic = elastic; elastic {
					reg.Agent, reg.Least = a.UUID, 1
				}
				ks[rank], err = to.Register(l, hello, to.Addr, reg.Host, RegisterWorker, reg, func(_ *Client, m Message) {
					if m.Kind == KindWorld {
						begun <- struct{}{}
					}
				})
				require.NoError(t, err)
				defer ks[rank].Close()
			}
			for range ks {
				select {
				case <-begun:
				case <-time.After(time.Minute):
					require.FailNow(t, "the world does not begin")
				}
			}
			var all sync.WaitGroup
			for i := range 60 {
				all.Go(func() { attackSession(t, to, as[0].keys.Control, uint64(i)) })
				if i%10 == 9 {
					all.Wait()
				}
			}
			all.Wait()
			for rank, k := range ks {
				require.NoError(t, k.Ctx.Err(), rank)
				got, err := NewRemote(t.Context(), k, FirstEpoch).Call(t.Context(), Call{Op: OpAdd, N: 1, Fields: [][]byte{[]byte("count")}})
				require.NoError(t, err)
				require.Equal(t, []any{byte(StatusOK), int64(rank + 1)}, []any{got.Op, got.N})
			}
			for _, a := range as {
				require.NoError(t, a.Context().Err())
			}
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			require.Less(t, m.HeapAlloc, uint64(256<<20))
		})
	}
}

// attackSession sends random messages in one session. With an even seed it has a worker's token only; otherwise the secret, and does
// not say that it is a launcher, which could stop the job.
func attackSession(t *testing.T, to Target, secret Credential, seed uint64) {
	r := composer{rand.New(rand.NewPCG(seed, 4))}
	if seed%2 == 1 {
		to.Key = secret
	}
	l, _, err := to.Dial(t.Context())
	if err != nil {
		return
	}
	defer l.Close()
	read := make(chan struct{})
	go func() {
		defer close(read)
		for err := error(nil); err == nil; {
			_, _, err = l.readMessage(time.Second)
		}
	}()
	records := []any{Registration{}, host{}, elsewhere{}, Exit{}, Fault{}, pathReport{}, news{}}
	number := uint64(1)
	for range 40 {
		m := r.message(records)
		if to.Key.Worker && r.IntN(4) == 0 {
			m.Kind, m.ID = kindRegister, RegisterWorker
			reg := r.record(Registration{}).(*Registration)
			m.Body = Pack(marshalRecord(reg))
		}
		if !to.Key.Worker && (m.Kind == kindElsewhere || m.Kind == kindRegister) {
			m.Kind = kindVote
		}
		f := Frame{number: number, ack: r.number(), Body: m.Encode()}
		switch r.IntN(12) {
		case 0:
			f.Body = f.Body[:r.IntN(len(f.Body))]
		case 1:
			f.number = r.number()
		case 2:
			f.number = 0
		case 3:
			f.Body = append(f.Body, make([]byte, r.IntN(MaxFrameBytes/2))...)
		}
		if f.number == number {
			number++
		}
		if l.Write(f, time.Second) != nil {
			break
		}
	}
	l.Close()
	<-read
}
