package comm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testhost"
)

// TestVerdictOfTheRecorders has three processes, of which rank 1 does not issue the second
// all-reduce. The others find that in the recorders of all ranks.
func TestVerdictOfTheRecorders(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	gs := joined(t, testgpu.Context(t), devs)
	late := errors.New("an operation has not completed")
	groups.Each(t, gs, func(i int, g *comm.Group) error {
		xs, err := comm.MakeFrom(g, make([]float32, 8))
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = xs.Close() })
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil || i == 1 {
			return err
		}
		return comm.AllReduce(g, comm.Sum, xs...)
	})
	require.NoError(t, gs[1].Wait(testgpu.Context(t)))
	for _, rank := range []int{0, 2} {
		err := comm.Analyzed(testgpu.Context(t), gs[rank], time.Minute, late)
		require.ErrorIs(t, err, late)
		require.ErrorContains(t, err, "an operation has not completed; the flight recorders of the ranks say: Rank 1 ")
		require.ErrorContains(t, err, "has not issued collective 2 (all_reduce(8 x Float, sum))")
	}
}

// The store of a job can delete the dumps.
var _, _ comm.Deleter = (*cluster.World)(nil), (*cluster.Session)(nil)

// TestDumpsAreDeleted checks that the dumps stay while a rank may read them, and not longer.
func TestDumpsAreDeleted(t *testing.T) {
	ctx := testgpu.Context(t)
	gs, dumps := joinExchanges(t, func(_ int, b *testgpu.Exchange) comm.Rendezvous { return b })
	for rank := range 2 {
		_ = comm.Analyzed(ctx, gs[rank], time.Minute, errors.New("late"))
	}
	require.Equal(t, []int{0, 1, 2}, dumps(), "all ranks were asked")
	require.NoError(t, gs[0].Close())
	require.Equal(t, []int{0, 1, 2}, dumps(), "rank 1 may read them")
	require.NoError(t, errors.Join(gs[1].Close(), gs[2].Close()))
	require.Empty(t, dumps())
}

// TestDumpsStayForALateRank has a rank that writes its dump and ends its group before the other ranks write
// theirs.
func TestDumpsStayForALateRank(t *testing.T) {
	ctx := testgpu.Context(t)
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	gs, dumps := joinExchanges(t, func(rank int, b *testgpu.Exchange) comm.Rendezvous {
		if rank == 0 {
			return b
		}
		return &dumpExchange{b, func() error { <-goOn; return nil }}
	})
	_ = comm.Analyzed(ctx, gs[0], time.Millisecond, errors.New("late"))
	require.NoError(t, gs[0].Close())
	require.Equal(t, []int{0}, dumps(), "the others may read it")
	release()
	late := errors.New("late")
	require.Equal(t, late, comm.Analyzed(ctx, gs[1], time.Minute, late), "all ranks have answered, and all have done the same")
	require.NoError(t, errors.Join(gs[1].Close(), gs[2].Close()))
	require.Empty(t, dumps())
}

// TestDumpsStayWithoutOneOfThem has a rank that cannot write its dump.
func TestDumpsStayWithoutOneOfThem(t *testing.T) {
	ctx := testgpu.Context(t)
	gs, dumps := joinExchanges(t, func(rank int, b *testgpu.Exchange) comm.Rendezvous {
		if rank != 2 {
			return b
		}
		return &dumpExchange{b, func() error { return errors.New("the store is full") }}
	})
	for rank := range 2 {
		_ = comm.Analyzed(ctx, gs[rank], time.Millisecond, errors.New("late"))
	}
	for _, g := range gs {
		require.NoError(t, g.Close())
	}
	require.Equal(t, []int{0, 1}, dumps())
}

// joinExchanges joins a group of three ranks whose exchanges are wrapped, and returns a function that lists the ranks
// whose dumps are in the store.
func joinExchanges(t *testing.T, wrap func(rank int, b *testgpu.Exchange) comm.Rendezvous) (gs []*comm.Group, dumps func() []int) {
	t.Helper()
	var bs [3]*exchange
	gs, errs := joinBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: len(bs)}), func(i int, b *exchange) (comm.Rendezvous, *comm.Config) {
		bs[i] = b
		return wrap(i, b), nil
	})
	require.NoError(t, errors.Join(errs...))
	return gs, func() (list []int) {
		for rank := range gs {
			if bs[0].Has(comm.DumpKey(gs[0], rank)) {
				list = append(list, rank)
			}
		}
		return list
	}
}

// A dumpExchange calls a function before its rank writes its dump, and does not write it if the function fails.
type dumpExchange struct {
	*testgpu.Exchange
	before func() error
}

func (b *dumpExchange) Set(ctx context.Context, key string, value []byte) error {
	if strings.HasSuffix(key, fmt.Sprint("dump/", b.Rank())) {
		if err := b.before(); err != nil {
			return err
		}
	}
	return b.Exchange.Set(ctx, key, value)
}

// TestNoVerdictWithoutDifference compares ranks that have completed everything.
func TestNoVerdictWithoutDifference(t *testing.T) {
	late := errors.New("late")
	require.Equal(t, late, comm.Analyzed(testgpu.Context(t), twoRanks(t)[0], time.Minute, late))
}

// TestRankWithoutAnswerIsNamed ends the wait before rank 1 could answer.
func TestRankWithoutAnswerIsNamed(t *testing.T) {
	ctx, gs := testgpu.Context(t), twoRanks(t)
	require.NoError(t, gs[1].Close()) // its process ends
	xs, _ := shards(t, gs[0], 8)
	_ = comm.AllReduce(gs[0], comm.Sum, xs...)
	require.ErrorContains(t, comm.Analyzed(ctx, gs[0], 2*time.Second, errors.New("late")), "No answer came from rank 1")
}

// TestFewRanksOfALargeGroupCompare counts them.
func TestFewRanksOfALargeGroupCompare(t *testing.T) {
	for size, want := range map[int]int{1: 1, 8: 8, 9: 9, 64: 8, 1000: 8, 1023: 9} {
		n := 0
		for rank := range size {
			if comm.Analyst(rank, size) {
				n++
			}
		}
		require.Equal(t, want, n, "%d ranks", size)
	}
}

// TestVerdictOfTheService has a service that knows of a silent rank. Another job's service is not
// believed.
func TestVerdictOfTheService(t *testing.T) {
	silent := testhost.RASRank{Host: "10.0.0.2", PID: 4711, Silent: true}
	for name, c := range map[string]struct {
		pid  int
		want string
	}{
		"this job":    {os.Getpid(), "late\nNCCL's RAS: rank 1 (process 4711 on host 10.0.0.2) does not answer"},
		"another job": {os.Getpid() + 1, "late"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("NCCL_RAS_ADDR", testhost.ServeRAS(t, testhost.RASAnswer(testhost.RASRank{PID: c.pid}, silent)))
			gs := twoRanks(t)
			late := errors.New("late")
			err := analyzedByService(t, gs[0], late)
			require.ErrorIs(t, err, late)
			require.EqualError(t, err, c.want)
		})
	}
}

// TestServiceIsBeneathTheVerdict has a service and recorders that both know of rank 1.
func TestServiceIsBeneathTheVerdict(t *testing.T) {
	t.Setenv("NCCL_RAS_ADDR", testhost.ServeRAS(t, testhost.RASAnswer(testhost.RASRank{PID: os.Getpid(), AllReduces: 1}, testhost.RASRank{PID: os.Getpid()})))
	gs := twoRanks(t)
	xs, _ := shards(t, gs[0], 8)
	go func() { _ = comm.AllReduce(gs[0], comm.Sum, xs...) }() // waits for rank 1
	require.Eventually(t, func() bool { return gs[0].Communicator(0).Progress().Issued.Record > 0 }, time.Minute, time.Millisecond)
	err := analyzedByService(t, gs[0], errors.New("late"))
	require.Regexp(t, `(?s)^late; the flight recorders of the ranks say: Rank 1 .*\nNCCL's RAS: the ranks have launched different numbers of AllReduce: rank 1 \(process \d+ on host \) 0, rank 0 \(process \d+ on host \) 1$`, err.Error())
}

// analyzedByService returns the analysis of an error. It asks again if there are no findings of the
// service: the limits for its answers are shorter than a busy machine may stop.
func analyzedByService(t *testing.T, g *comm.Group, late error) (err error) {
	t.Helper()
	for range 5 {
		err = comm.Analyzed(testgpu.Context(t), g, time.Minute, late)
		if strings.Contains(err.Error(), "NCCL's RAS: ") {
			break
		}
	}
	return err
}

// TestSilentServiceDelaysNothing has a service that does not answer the question. The verdict waits
// no longer for it than for the recorders.
func TestSilentServiceDelaysNothing(t *testing.T) {
	t.Setenv("NCCL_RAS_ADDR", "")
	gs, late := twoRanks(t), errors.New("late")
	require.Equal(t, late, comm.Analyzed(testgpu.Context(t), gs[0], time.Minute, late)) // all recorders have answered
	t.Setenv("NCCL_RAS_ADDR", testhost.Listen(t, func(c net.Conn) {
		testhost.SpeakRAS(c, true, func() string { _, _ = io.Copy(io.Discard, c); return "" })
	}))
	var err error
	var took time.Duration
	for range 5 { // the machine may stop for a while
		begin := time.Now()
		err = comm.Analyzed(testgpu.Context(t), gs[0], 100*time.Millisecond, late)
		if took = time.Since(begin); took < time.Second && err == late {
			return
		}
	}
	t.Errorf("the verdict took %v: %v: the question to the service takes 2 s", took, err)
}

// TestNoServiceOfVirtualDevices does not ask the default port.
func TestNoServiceOfVirtualDevices(t *testing.T) {
	t.Setenv("NCCL_RAS_ADDR", "")
	require.Empty(t, comm.ServiceAddress(twoRanks(t)[0]))
	t.Setenv("NCCL_RAS_ADDR", "10.0.0.1:9")
	require.Equal(t, "10.0.0.1:9", comm.ServiceAddress(twoRanks(t)[0]))
}

// twoRanks returns the groups of two ranks.
func twoRanks(t *testing.T) []*comm.Group {
	t.Helper()
	return joined(t, testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
}
