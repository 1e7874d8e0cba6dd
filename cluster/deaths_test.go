package cluster

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

var deathPoints = flag.Int("deaths", 8, "deaths of the coordinator in each test of TestCoordinatorDies; 0 means after each message")

// A mortal is the network of the coordinator's host. The coordinator dies after it has sent a number of messages:
// all connections end at once, and nobody can connect.
type mortal struct {
	*relay
	buries func() // called at the death, before the others can notice it

	mu    sync.Mutex // held while a message is sent
	armed bool
	left  int // messages until the death
	sent  int // messages since arm
	dead  bool
}

// forward forwards the messages of the coordinator on one connection.
func (d *mortal) forward(to, from net.Conn) {
	b := make([]byte, job.AnswerBytes)
	_, err := io.ReadFull(from, b)
	if err == nil {
		_, err = to.Write(b)
	}
	for err == nil {
		if b, err = readFrame(from); err == nil {
			time.Sleep(time.Duration(rand.IntN(4)) * time.Millisecond) // messages to different processes have no order
			err = d.send(to, b)
		}
	}
	_ = to.(*net.TCPConn).CloseWrite()
}

// readFrame reads the bytes of one message.
func readFrame(c net.Conn) ([]byte, error) {
	b := make([]byte, 4)
	if _, err := io.ReadFull(c, b); err != nil {
		return nil, err
	}
	b = append(b, make([]byte, binary.BigEndian.Uint32(b))...)
	_, err := io.ReadFull(c, b[4:])
	return b, err
}

// send sends a message if the coordinator lives.
func (d *mortal) send(to net.Conn, b []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return net.ErrClosed
	}
	_, err := to.Write(b)
	if d.armed {
		d.sent++
		d.left--
		d.check()
	}
	return err
}

// arm lets the coordinator die after n further messages.
func (d *mortal) arm(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.armed, d.left = true, n
	d.check()
}

func (d *mortal) check() {
	if d.left > 0 {
		return
	}
	d.dead, d.armed = true, false
	d.buries()
	d.ln.Close()
	d.reset()
}

// protect reports whether the coordinator lives. From then on it is not killed any more.
func (d *mortal) protect() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.armed = false
	return !d.dead
}

func (d *mortal) isDead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead
}

// A deathJob is an elastic job of three hosts with one worker each. The first host coordinates.
type deathJob struct {
	*witness
	*mortal
	as      []*job.Agent
	workers []*randomWorker // the last of each host
	finish  chan struct{}
}

func newDeathJob(t *testing.T) *deathJob {
	j := &deathJob{witness: newWitness(t), finish: make(chan struct{})}
	j.reportBy = time.Second // the coordinator may be dead
	cfgs := elasticHosts(t, 1, 3, 1)
	j.mortal = &mortal{buries: func() { j.bury(j.workers[0]) }}
	j.relay = newRelayWith(t, cfgs[0].Bind, j.forward)
	for _, c := range cfgs {
		c.Seeds, c.NoGossip, c.Notify = []string{j.addr()}, true, j.notify
		c.Timing = Timing{Join: time.Hour, Revoke: time.Hour, Drain: time.Hour, Heartbeat: 20 * time.Second, LostAfter: time.Minute, Backoff: time.Millisecond}
	}
	cfgs[0].Advertise = j.addr()
	as, errs := startAll(t, cfgs...)
	require.NoError(t, errors.Join(errs...))
	j.as = as
	started := map[int]*randomWorker{}
	for i, a := range as {
		started[i] = j.start(a, 0, j.finish)
		j.workers = append(j.workers, started[i])
	}
	awaitWorlds(t, started)
	return j
}

// obey obeys the coordinator's orders to the launchers.
func (j *deathJob) obey() {
	for i, a := range j.as {
		if i == 0 && j.isDead() {
			continue
		}
		select {
		case o := <-a.Orders():
			switch r := j.workers[i]; {
			case o.Start:
				j.workers[i] = j.start(a, 0, j.finish)
			case o.Stop:
				go func() { <-r.result; a.Close() }()
			}
		default:
		}
	}
}

// await waits until the workers of the hosts run in one epoch, and reports whether the coordinator lives. Without it,
// those are the workers of the other hosts.
func (j *deathJob) await(hosts ...int) bool {
	deadline := time.After(time.Minute)
	for {
		j.obey()
		dead := j.isDead()
		if j.runs(hosts, dead) && j.protect() == !dead {
			return !dead
		}
		select {
		case <-deadline:
			require.FailNow(j.t, "the job does not go on", j.text())
		case <-time.After(time.Millisecond):
		}
	}
}

// runs reports whether the last epoch has the workers of the hosts, and all their functions run.
func (j *deathJob) runs(hosts []int, dead bool) bool {
	var want []string
	for _, i := range hosts {
		if i > 0 || !dead {
			want = append(want, j.as[i].Host()+"/0")
		}
	}
	j.witness.mu.Lock()
	defer j.witness.mu.Unlock()
	list := slices.Sorted(slices.Values(j.lists[j.last]))
	slices.Sort(want)
	return slices.Equal(list, want) && j.running[j.last] == len(want)
}

// text returns the epochs, and the lines of all hosts.
func (j *deathJob) text() string {
	j.witness.mu.Lock()
	defer j.witness.mu.Unlock()
	return fmt.Sprintf("epochs %v, functions %v\n%s", j.lists, j.running, strings.Join(j.lines, "\n"))
}

// end ends the functions and the job of the hosts.
func (j *deathJob) end(hosts ...int) {
	close(j.finish)
	var wg sync.WaitGroup
	errs := make([]error, len(j.as))
	for _, i := range hosts {
		wg.Go(func() { errs[i] = errors.Join(<-j.workers[i].result, j.as[i].Shutdown(j.t.Context())) })
	}
	wg.Wait()
	require.NoError(j.t, errors.Join(errs...), j.text())
}

// requireNamed checks that the survivors learn which host was lost.
func (j *deathJob) requireNamed(host string) {
	lost := func(d Departure) bool { return d.Host == host }
	require.True(j.t, slices.ContainsFunc(j.workers[1].left, lost), "%v", j.workers[1].left)
	text := j.text()
	require.Equal(j.t, 2, strings.Count(text, "choose another coordinator"), text)
	require.Regexp(j.t, fmt.Sprintf(`(?m)host %s\b.*; the hosts of epoch \d+ choose another coordinator$`, host), text)
	require.Regexp(j.t, fmt.Sprintf(`(?m)epoch \d+: .*host %s\b.* left: `, host), text)
}

// A worker is killed and started again, so that the world shrinks and grows.
func workerDies(t *testing.T, after int) (sent int) {
	j := newDeathJob(t)
	j.arm(after)
	j.kill(j.as[2], j.workers[2])
	return j.goOn()
}

// goOn waits until all workers work again, and ends the job. It returns the number of messages if the coordinator lives.
func (j *deathJob) goOn() (sent int) {
	if j.await(0, 1, 2) {
		j.end(0, 1, 2)
		return j.sent
	}
	j.end(1, 2)
	j.requireNamed(j.as[0].Host())
	return 0
}

// A worker that was killed joins again, at the end of a step.
func workerJoins(t *testing.T, after int) (sent int) {
	j := newDeathJob(t)
	j.kill(j.as[2], j.workers[2])
	require.Eventually(t, func() bool { return j.runs([]int{0, 1}, false) }, time.Minute, time.Millisecond)
	j.arm(after)
	return j.goOn()
}

// The host of the coordinator leaves, so that another one coordinates.
func coordinatorDrains(t *testing.T, after int) (sent int) {
	j := newDeathJob(t)
	require.Eventually(t, j.as[0].CanDrain, time.Minute, time.Millisecond)
	j.arm(after)
	_ = j.as[0].Drain("received SIGTERM", 143) // an error means that it is dead
	lives := j.await(1, 2)
	j.end(1, 2)
	j.requireNamed(j.as[0].Host())
	if lives {
		return j.sent
	}
	return 0
}

// The coordinator dies after any number of messages of a change. The others form one chain of epochs: an epoch never has two
// lists, and never begins while a function of another one runs.
func TestCoordinatorDies(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, after int) int{"a worker dies": workerDies, "a worker joins": workerJoins, "its host leaves": coordinatorDrains} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			sent := change(t, 1<<30)
			points := rand.New(rand.NewPCG(seed, 1)).Perm(sent + 1)
			if *deathPoints > 0 {
				points = points[:min(*deathPoints, len(points))]
			}
			t.Logf("%d messages, seed %d", sent, seed)
			for _, after := range points {
				t.Run(fmt.Sprint("after ", after), func(t *testing.T) {
					t.Parallel()
					change(t, after)
				})
			}
		})
	}
}
