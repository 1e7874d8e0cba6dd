package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// recoveryMain measures how long the ranks of a job need to go on after one of them is killed.
// In the first epoch, all ranks but the last one enqueue all-reduces, as many as a stream takes
// within two seconds. Then the last rank, which has enqueued none, kills its own process. It prints
// when the survivors had an error, and when the first all-reduce of each later epoch had completed,
// in milliseconds since the kill.
//
// With -running all ranks enqueue all-reduces all the time, so that operations run and end when the last rank is killed, two
// seconds after the first one. Then the survivors also print how many they had enqueued, and how many of them are known to have ended.
//
//	chorus run --nproc-per-node 4 --max-restarts 1 -- bench recovery -queued 1000
//	chorus run --nproc-per-node 4 --max-restarts 1 -- bench recovery -queued 1000 -running
//
// testdata/recovery.py measures the same of torchrun.
func recoveryMain() {
	log.SetPrefix("recovery: ")
	m := measurement{}
	flag.IntVar(&m.queued, "queued", 5, "all-reduces that each survivor has enqueued when the rank is killed; with -running, at most")
	flag.BoolVar(&m.running, "running", false, "kill the rank while all-reduces of all ranks run and end")
	flag.IntVar(&m.elements, "elements", 1<<18, "float32 `elements` of an all-reduce")
	flag.StringVar(&m.mark, "mark", filepath.Join(os.TempDir(), "recovery-"+os.Getenv("CHORUS_JOB")), "`file` for the time of the kill")
	flag.Parse()
	if err := m.run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

// A measurement is the work of one process.
type measurement struct {
	queued, elements int
	running          bool
	mark             string

	dev  *device.Device
	size int // of the first epoch; 0 in a process that was started later
}

func (m *measurement) run(ctx context.Context) error {
	sys, _, err := device.OrVirtual()
	if err != nil {
		return err
	}
	local, _ := strconv.Atoi(os.Getenv("LOCAL_RANK")) // unset: a process without a launcher
	m.dev = sys.Devices()[local%len(sys.Devices())]
	return cluster.Run(ctx, nil, m.epoch)
}

// epoch ends the program when the killed rank is back.
func (m *measurement) epoch(ctx context.Context, w *cluster.World) error {
	g, err := comm.Join(ctx, w, m.dev, nil)
	if err != nil {
		return err
	}
	defer g.Close()
	data, err := memory.Make[float32](g.Stream(0), m.elements)
	if err != nil {
		return err
	}
	defer data.Close()
	if err := reduce(ctx, g, data); err != nil {
		return err
	}
	if w.Epoch() == 1 {
		m.size = w.Size()
		if m.running {
			return m.loseRunning(ctx, w, g, data)
		}
		return m.lose(ctx, w, g, data)
	}
	if w.Rank() == 0 {
		m.report(fmt.Sprintf("epoch %d of %d ranks, first all-reduce", w.Epoch(), w.Size()))
	}
	for complete := false; !complete; {
		if err := w.Step(); err != nil {
			return err
		}
		if complete, err = m.complete(ctx, w, g); err != nil {
			return err
		}
	}
	return g.Shutdown(ctx)
}

// complete reports whether the world has its first size again. Rank 0 is a survivor and knows it.
func (m *measurement) complete(ctx context.Context, w *cluster.World, g *comm.Group) (bool, error) {
	back := w.Size() == m.size
	err := comm.BroadcastValue(ctx, g, 0, &back, comm.Gob)
	return back, err
}

func reduce(ctx context.Context, g *comm.Group, data memory.Slice[float32]) error {
	if err := comm.AllReduce(g, comm.Sum, data); err != nil {
		return err
	}
	return g.Wait(ctx)
}

// lose enqueues the all-reduces on the survivors, kills the last rank, and waits for the error.
func (m *measurement) lose(ctx context.Context, w *cluster.World, g *comm.Group, data memory.Slice[float32]) error {
	victim := w.Rank() == w.Size()-1
	enqueued := make(chan struct{})
	if victim {
		close(enqueued)
	} else {
		go m.enqueue(g, data, enqueued)
	}
	defer func() { <-enqueued }()
	select {
	case <-enqueued:
	case <-time.After(blockedAfter):
	}
	if err := w.Barrier(ctx, "enqueued"); err != nil {
		return err
	}
	if victim {
		return m.kill()
	}
	err := g.Wait(ctx)
	if err == nil {
		return errors.New("all-reduces without the killed rank have completed")
	}
	return m.close(w, g, err)
}

// close reports the times of an error and of the group's end.
func (m *measurement) close(w *cluster.World, g *comm.Group, err error) error {
	m.report(fmt.Sprintf("rank %d, error", w.Rank()))
	err = errors.Join(err, g.Close())
	m.report(fmt.Sprintf("rank %d, group closed", w.Rank()))
	return err
}

// loseRunning issues all-reduces on all ranks, and kills the last rank meanwhile.
func (m *measurement) loseRunning(ctx context.Context, w *cluster.World, g *comm.Group, data memory.Slice[float32]) error {
	if err := w.Barrier(ctx, "running"); err != nil {
		return err
	}
	if w.Rank() == w.Size()-1 {
		time.AfterFunc(killedAfter, func() { log.Fatal(m.kill()) })
	}
	err := m.issue(ctx, g, data)
	if _, markErr := os.Stat(m.mark); markErr != nil {
		return fmt.Errorf("an error before the last rank was killed: %w", err)
	}
	p := g.Communicator(0).Progress()
	fmt.Printf("rank %d: %d operations enqueued, %d known to have ended\n", w.Rank(), p.Issued.Record, p.Completed.Record)
	return m.close(w, g, err)
}

// killedAfter is how long the all-reduces of -running run before the last rank is killed.
const killedAfter = 2 * time.Second

// issue enqueues all-reduces, of which at most m.queued are in progress, until one fails.
func (m *measurement) issue(ctx context.Context, g *comm.Group, data memory.Slice[float32]) error {
	var ends [2]*stream.Event // after each half of m.queued, in turns
	for i := range ends {
		e, err := stream.NewEvent(m.dev, nil)
		if err != nil {
			return err
		}
		defer e.Close()
		ends[i] = e
	}
	for n := 0; ; n++ {
		if err := ends[n%2].Sync(ctx); err != nil {
			return err
		}
		for range max(1, m.queued/2) {
			if err := comm.AllReduce(g, comm.Sum, data); err != nil {
				return err
			}
		}
		if err := ends[n%2].Record(g.Stream(0)); err != nil {
			return err
		}
	}
}

// blockedAfter is the time after which a call that enqueues an all-reduce counts as waiting for room.
const blockedAfter = 2 * time.Second

// enqueue enqueues the all-reduces, and ends early if the group ends.
func (m *measurement) enqueue(g *comm.Group, data memory.Slice[float32], done chan<- struct{}) {
	defer close(done)
	for range m.queued {
		if comm.AllReduce(g, comm.Sum, data) != nil {
			return // Wait reports why
		}
	}
}

// kill keeps the time and ends this process.
func (m *measurement) kill() error {
	if err := os.WriteFile(m.mark, strconv.AppendInt(nil, time.Now().UnixNano(), 10), 0o600); err != nil {
		return err
	}
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

func (m *measurement) report(what string) {
	b, err := os.ReadFile(m.mark)
	if err != nil {
		log.Fatal(err)
	}
	at, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %d ms\n", what, (time.Now().UnixNano()-at)/1e6)
}
