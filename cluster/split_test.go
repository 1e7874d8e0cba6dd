package cluster

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// profileVar is "default" for the default time limits in elasticMain, and "drain" for a short one for planned changes.
const profileVar = "CLUSTER_TEST_PROFILE"

// elasticMain is a launcher with one worker, which is in the same process. It ends after SIGUSR1
// to one of the launchers.
func elasticMain(host, seed string) int {
	nodes, _ := strconv.Atoi(os.Getenv(nodesVar))
	timing := quick
	timing.LostAfter = 4 * time.Second
	switch os.Getenv(profileVar) {
	case "default":
		timing = Timing{}
	case "drain":
		timing.Drain = time.Second
	}
	a, err := job.Start(context.Background(), &job.Config{Job: "split", Nodes: nodes, MinNodes: 1, Host: host, Seeds: []string{seed}, Secret: testSecret, Timing: timing,
		Notify: func(line string) { fmt.Println(line) }})
	if err != nil {
		fmt.Println("start:", err)
		return 41
	}
	defer a.Close()
	for _, v := range a.WorkerEnv(0) {
		name, value, _ := strings.Cut(v, "=")
		os.Setenv(name, value)
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	err = Run(context.Background(), nil, func(ctx context.Context, w *World) error {
		context.AfterFunc(ctx, func() { fmt.Println("epoch", w.Epoch(), "ends") })
		if err := w.Barrier(ctx, "begin"); err != nil {
			return err
		}
		fmt.Printf("works in epoch %d of %d\n", w.Epoch(), w.Size())
		go func() {
			select {
			case <-asked:
				_ = w.Set(ctx, "finish", []byte("yes")) // the next epoch asks again
			case <-ctx.Done():
			}
		}()
		_, err := w.Get(ctx, "finish")
		return err
	})
	if err != nil {
		fmt.Println("run:", err)
		return 42
	}
	if err := a.Shutdown(context.Background()); err != nil {
		fmt.Println("shut down:", err)
		return 43
	}
	return 0
}

// startElastic starts elasticMain on all hosts, and waits until they work in one epoch.
func (l *lan) startElastic(profile string) []*process {
	l.t.Helper()
	ps := make([]*process, l.Size())
	for i := range ps {
		ps[i] = l.start(i, []string{fmt.Sprint(nodesVar, "=", len(ps)), profileVar + "=" + profile}, "elastic", fmt.Sprint("n", i), l.IP(0))
	}
	for _, p := range ps {
		p.awaitEpochOf(l.t, len(ps))
	}
	return ps
}

// awaitEpochOf waits until the process works in an epoch of n processes. A live host that is starved may miss a change; it
// joins again at the next one, so the number of the epoch is not certain.
func (p *process) awaitEpochOf(t *testing.T, n int) {
	t.Helper()
	for !strings.Contains(p.await(t, "works in epoch"), fmt.Sprintf(" of %d\n", n)) {
	}
}

// TestSplit splits the network of an elastic job into two parts. The part with most hosts goes on,
// or the half with the coordinator. The other part ends and says why, also if the network is
// whole again.
func TestSplit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		goes, ends []int
		profile    string
	}{
		"the coordinator is in the minority": {goes: []int{2, 3, 4}, ends: []int{0, 1}},
		"the coordinator is in the majority": {goes: []int{0, 1, 2}, ends: []int{3, 4}},
		"two halves":                         {goes: []int{0, 1}, ends: []int{2, 3}},
		"the coordinator alone":              {goes: []int{1, 2}, ends: []int{0}},
		"two hosts":                          {goes: []int{0}, ends: []int{1}},
		"the default time limits":            {goes: []int{1, 2, 3}, ends: []int{0}, profile: "default"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := len(test.goes) + len(test.ends)
			l := newLAN(t, n)
			ps := l.startElastic(test.profile)
			l.Split(test.ends...)
			cut := time.Now()
			ps[test.goes[0]].await(t, "ends")
			t.Logf("epoch 1 ends %v after the cut", time.Since(cut))
			for _, i := range test.goes {
				require.Contains(t, ps[i].await(t, "works in epoch"), fmt.Sprintf("works in epoch 2 of %d\n", len(test.goes)))
			}
			t.Logf("the next epoch works %v after the cut", time.Since(cut))
			for _, i := range test.ends {
				text := ps[i].await(t, fmt.Sprintf(" of the %d hosts of epoch 1", n))
				_, has, _ := strings.Cut(text, "this part of the network has ")
				var hosts int
				_, err := fmt.Sscan(has, &hosts)
				require.NoError(t, err, text)
				require.Positive(t, hosts, text)
				require.LessOrEqual(t, hosts, len(test.ends), "fewer if another host of the part gave up first: %s", text)
				code, rest := ps[i].exit()
				require.Equal(t, 42, code, rest)
				require.NotContains(t, text+rest, "works in epoch")
			}
			l.Join(test.ends...)
			require.NoError(t, ps[test.goes[0]].cmd.Process.Signal(syscall.SIGUSR1))
			for _, i := range test.goes {
				code, text := ps[i].exit()
				require.Zero(t, code, text)
				require.NotContains(t, text, "works in epoch", "the epoch of the others goes on")
			}
		})
	}
}

// TestOneWay breaks one direction of a cable: packets to a host are lost, or its packets to the coordinator. The others
// go on without it, after one change.
func TestOneWay(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]func(l *lan){
		"the host hears nobody":            func(l *lan) { l.Do("tc qdisc add dev %s root pfifo limit 0", l.Port(2)) },
		"the coordinator hears nothing":    func(l *lan) { l.Do("ip -n %s route add blackhole %s/32", l.NS(2), l.IP(0)) },
		"the coordinator cannot answer it": func(l *lan) { l.Do("ip -n %s route add blackhole %s/32", l.NS(0), l.IP(2)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t, 3)
			ps := l.startElastic("")
			harm(l)
			for _, p := range ps[:2] {
				require.Contains(t, p.await(t, "works in epoch"), "works in epoch 2 of 2\n")
			}
			code, text := ps[2].exit()
			require.Equal(t, 42, code, text)
			require.NotContains(t, text, "works in epoch")
			require.NoError(t, ps[0].cmd.Process.Signal(syscall.SIGUSR1))
			for _, p := range ps[:2] {
				code, text := p.exit()
				require.Zero(t, code, text)
				require.NotContains(t, text, "works in epoch", "the epoch goes on")
			}
		})
	}
}

// TestVanishedHosts cuts hosts off, the coordinator among them. The others go on, whichever hosts vanish. It prints how long
// that took; TestVanishedHostsCostLittleTime limits the time, without the other work of this machine.
func TestVanishedHosts(t *testing.T) {
	t.Parallel()
	for name, vanish := range map[string][]int{"the coordinator": {0}, "and the next host": {0, 1}, "and another host": {0, 3}} {
		t.Run(name, func(t *testing.T) {
			l := newLAN(t, 5)
			ps := l.startElastic("")
			cut := time.Now()
			for _, i := range vanish {
				l.Cut(i)
			}
			for i, p := range ps {
				if !slices.Contains(vanish, i) {
					p.awaitEpochOf(t, len(ps)-len(vanish))
				}
			}
			t.Logf("the next epoch works after %v", time.Since(cut))
		})
	}
}

// TestNobodyReachesTheCoordinator drops all packets to the coordinator, whose own packets arrive. The others are a majority, and go on.
func TestNobodyReachesTheCoordinator(t *testing.T) {
	t.Parallel()
	l := newLAN(t, 3)
	ps := l.startElastic("")
	for i := 1; i < 3; i++ {
		l.Do("ip -n %s route add blackhole %s/32", l.NS(i), l.IP(0))
	}
	for _, p := range ps[1:] {
		require.Contains(t, p.await(t, "works in epoch"), "works in epoch 2 of 2\n")
	}
	code, text := ps[0].exit()
	require.Equal(t, 42, code, text)
	require.NotContains(t, text, "works in epoch")
}

// A host hears nothing from the coordinator for the limit, and the others do. It gives the coordinator up, finds no other one, and returns
// when it hears the coordinator again.
func TestHostReturnsToTheCoordinator(t *testing.T) {
	t.Parallel()
	l := newLAN(t, 3)
	ps := l.startElastic("drain")
	l.Lose(0, 2)
	ps[2].await(t, "choose another coordinator")
	l.Find(0, 2)
	for _, p := range ps {
		p.awaitEpochOf(t, 3)
	}
	require.NoError(t, ps[0].cmd.Process.Signal(syscall.SIGUSR1))
	for _, p := range ps {
		code, text := p.exit()
		require.Zero(t, code, text)
	}
}
