package job

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var fixedJobs = flag.Uint64("fixedjobs", 3000, "number of jobs of a fixed size that are simulated")

// A fixedJob is a coordinator of a job of a fixed size, with launchers and processes that do what those of `chorus run` and Attach do.
// Their messages arrive in any order, but those of one process in the order in which it sent them.
type fixedJob struct {
	*paperJob
	t     *testing.T
	rng   *rand.Rand
	hosts []*fixedHost
	epoch uint64 // of the last plan
	ended bool   // all launchers know that all processes have ended
	log   []string
}

type fixedHost struct {
	peer    *peer
	uuid    string
	gone    bool
	attempt uint64 // that it is asked to stay for, and has not answered
	again   bool   // it stops its process, and reports that it has exited
	rank    int    // of its process; -1: none has been started
	epoch   uint64
	worker  *peer    // of its process, if that has registered
	out     []func() // what it and its process have sent
}

func (j *fixedJob) say(format string, args ...any) {
	j.log = append(j.log, fmt.Sprintf("%v ", j.now)+fmt.Sprintf(format, args...))
}

func (j *fixedJob) require(ok bool, format string, args ...any) {
	j.t.Helper()
	if !ok {
		for _, l := range j.log {
			j.t.Log(l)
		}
		require.FailNow(j.t, fmt.Sprintf(format, args...))
	}
}

func (j *fixedJob) happens(e event) {
	if err := j.happen(e); err != nil {
		j.require(false, "%v", err)
	}
	for _, h := range j.hosts {
		j.hear(h)
	}
	j.check()
}

// comes starts a launcher.
func (j *fixedJob) comes() {
	u := fmt.Sprint("h", len(j.hosts))
	h := &fixedHost{peer: &peer{addr: u, since: j.now, heard: j.now}, uuid: u, rank: -1}
	j.hosts = append(j.hosts, h)
	j.say("%s comes", u)
	j.happens(received{h.peer, msg{kind: kindRegister, id: registerAgent, rec: &record{value: &host{Host: u, UUID: u, NodeRank: -1,
		Nodes: j.cfg.agents, MinNodes: j.cfg.leastHosts(), Restarts: j.cfg.again.most, LocalSize: 1, PID: len(j.hosts)}}}})
}

// hear lets a launcher and its process receive what the coordinator has sent to them.
func (j *fixedJob) hear(h *fixedHost) {
	for _, m := range j.take(h.peer) {
		switch m.Kind {
		case kindRequestVote:
			h.attempt = m.ID
		case kindPlan:
			var p plan
			require.NoError(j.t, m.Record(&p))
			h.rank, h.epoch, h.again, h.worker = p.nodeOf(h.uuid), m.Epoch, false, nil
			j.require(h.rank >= 0 && p.Restarts == int(m.Epoch)-1, "%s is not in the plan of epoch %d", h.uuid, m.Epoch)
		case KindFault:
			var f Fault
			require.NoError(j.t, m.Record(&f))
			if h.again = f.Again; f.Again {
				j.exits(h, 143, true)
				h.sends(func() { j.tells(h, kindReady, nil) })
			}
		case KindRefuse:
			h.gone = true
		case kindEnded:
			j.ended = true
		}
	}
}

func (h *fixedHost) sends(f func()) { h.out = append(h.out, f) }

func (j *fixedJob) tells(h *fixedHost, k Kind, v any) {
	m := msg{kind: k, epoch: FirstEpoch}
	if v != nil {
		m.rec = &record{value: v}
	}
	j.say("%s says %d", h.uuid, k)
	j.happens(received{h.peer, m})
}

// attaches registers the process of a host.
func (j *fixedJob) attaches(h *fixedHost) {
	w := &peer{addr: h.uuid, worker: true, since: j.now, heard: j.now}
	h.worker = w
	epoch, rank := h.epoch, h.rank
	h.sends(func() {
		j.say("rank %d of %s attaches in epoch %d", rank, h.uuid, epoch)
		j.happens(received{w, msg{kind: kindRegister, rec: &record{value: &Registration{Epoch: epoch,
			Member: Member{Rank: rank, Host: h.uuid, PID: 1000 + int(epoch), LocalSize: 1, Node: rank}}}}})
	})
}

// exits ends the process of a host: its connection closes, and its launcher reports the exit, in any order.
func (j *fixedJob) exits(h *fixedHost, code int, asked bool) {
	if h.rank < 0 {
		return
	}
	w, x := h.worker, &Exit{Rank: h.rank, PID: 1000 + int(h.epoch), Code: code, Reason: fmt.Sprint("exited with code ", code), Asked: asked}
	h.rank, h.worker = -1, nil
	closes := func() {
		if w != nil && !w.over {
			j.say("the connection of the process of %s closes", h.uuid)
			j.happens(disconnected{w, ending{closed: true, reason: "its connection closed"}})
		}
	}
	reports := func() { j.tells(h, kindExit, x) }
	if j.rng.IntN(2) == 0 {
		closes, reports = reports, closes
	}
	h.sends(closes)
	h.sends(reports)
}

// leaves ends a launcher.
func (j *fixedJob) leaves(h *fixedHost) {
	h.gone, h.out = true, nil
	j.say("%s goes", h.uuid)
	if h.worker != nil && !h.worker.over {
		j.happens(disconnected{h.worker, ending{reason: "silent for 1s"}})
	}
	switch j.rng.IntN(3) {
	case 0:
		j.happens(received{h.peer, msg{kind: kindLeave, epoch: FirstEpoch}})
	case 1: // the coordinator was starved
		j.happens(received{h.peer, msg{kind: KindSilent, epoch: FirstEpoch}})
	}
	j.happens(disconnected{h.peer, ending{reason: "silent for 1s"}})
}

// check checks what must hold after each event.
func (j *fixedJob) check() {
	n := 0
	for _, a := range j.agents {
		if a.state != peerGone {
			n++
		}
	}
	j.require(n <= j.cfg.agents, "%d hosts have a place, of %d", n, j.cfg.agents)
	if j.plan != nil {
		j.require(len(j.plan.Hosts) >= j.cfg.leastHosts() && len(j.plan.Hosts) <= j.cfg.agents, "a plan of %d hosts", len(j.plan.Hosts))
	}
	j.require(j.coordinator.epoch >= j.epoch && j.retries.total <= j.cfg.again.most, "epoch %d, %d restarts", j.coordinator.epoch, j.retries.total)
	j.epoch = j.coordinator.epoch
}

// live returns the launchers that have not ended.
func (j *fixedJob) live() (out []*fixedHost) {
	for _, h := range j.hosts {
		if !h.gone {
			out = append(out, h)
		}
	}
	return out
}

// next lets one thing happen that need not wait for the user: a message arrives, or a host answers. It returns false if nothing can.
func (j *fixedJob) next() bool {
	live := j.live()
	j.rng.Shuffle(len(live), func(a, b int) { live[a], live[b] = live[b], live[a] })
	for _, h := range live {
		switch {
		case len(h.out) > 0:
			f := h.out[0]
			h.out = h.out[1:]
			f()
		case h.attempt != 0:
			attempt := h.attempt
			h.attempt = 0
			j.say("%s stays, attempt %d", h.uuid, attempt)
			j.happens(received{h.peer, msg{kind: kindVote, id: attempt}})
		default:
			continue
		}
		return true
	}
	return false
}

// A job of a fixed size whose hosts come, fail and leave in any order neither stalls nor has more hosts than places.
func TestJobsOfAFixedSize(t *testing.T) {
	restarts := 0
	for seed := range *fixedJobs {
		rng := rand.New(rand.NewPCG(seed, 7))
		most := 1 + rng.IntN(3)
		j := &fixedJob{t: t, rng: rng, paperJob: onPaper(CoordConfig{agents: most, least: 1 + rng.IntN(most), again: restartPolicy{most: rng.IntN(3), backoff: time.Second},
			Self: Welcome{Host: "h0", Agent: "h0", Rank: -1, LostAfter: time.Second}})}
		j.say("seed %d: %d to %d hosts, %d restarts", seed, j.cfg.least, most, j.cfg.again.most)
		for range 40 {
			live := j.live()
			switch k := rng.IntN(12); {
			case k < 2 && len(live) < most+1 && len(j.hosts) < 2*most+2:
				j.comes()
			case k == 2 && rng.IntN(3) == 0 && len(live) > 0:
				j.leaves(live[rng.IntN(len(live))])
			case k == 3:
				j.passes(time.Duration(rng.IntN(4000)) * time.Millisecond)
			case k == 4 && len(live) > 0:
				if h := live[rng.IntN(len(live))]; h.rank >= 0 && rng.IntN(2) == 0 {
					j.exits(h, 3, false)
				}
			case k == 5 && len(live) > 0:
				if h := live[rng.IntN(len(live))]; h.rank >= 0 && h.worker == nil {
					j.attaches(h)
				}
			default:
				j.next()
			}
		}
		for range 40 { // each limit passes
			for j.next() {
			}
			j.passes(10 * time.Second)
			if j.plan == nil && len(j.live()) < most {
				j.comes()
			}
		}
		restarts += j.retries.total
		if j.faults.stop != nil && j.restart == nil { // no restart is left
			j.require(j.retries.total == j.cfg.again.most || !j.faults.stop.Again, "stopped after %d restarts", j.retries.total)
			continue
		}
		j.require(j.plan != nil && j.restart == nil, "the job of %d hosts has not started: %d launchers live, %d have places", most, len(j.live()), len(j.agents))
		for _, h := range j.plan.Hosts {
			j.require(!j.find(h.UUID).gone, "%s is in the plan, and has gone", h.UUID)
		}
	}
	t.Logf("%d jobs with %d restarts", *fixedJobs, restarts)
	require.NotZero(t, restarts)
}

// All other hosts vanish while the job waits for its restart. Nothing runs any more that the coordinator could be cut off from: the
// job waits for other hosts.
func TestHostsVanishDuringARestart(t *testing.T) {
	j := &fixedJob{t: t, rng: rand.New(rand.NewPCG(1, 7)), paperJob: onPaper(CoordConfig{agents: 3, again: restartPolicy{most: 1},
		Self: Welcome{Host: "h0", Agent: "h0", Rank: -1, LostAfter: time.Second}})}
	settles := func() {
		for j.next() {
		}
	}
	for range 3 {
		j.comes()
	}
	settles()
	for _, h := range j.hosts {
		j.attaches(h)
	}
	settles()
	require.NotNil(t, j.world)
	j.exits(j.hosts[0], 3, false)
	for len(j.hosts[0].out) > 0 {
		f := j.hosts[0].out[0]
		j.hosts[0].out = j.hosts[0].out[1:]
		f()
	}
	require.NotNil(t, j.restart)
	j.now += 2 * time.Second
	j.hosts[0].peer.heard = j.now
	for _, h := range j.hosts[1:] {
		j.leaves(h)
	}
	require.Len(t, j.agents, 1)
	j.comes()
	j.comes()
	settles()
	require.NotNil(t, j.plan)
	require.Len(t, j.plan.Hosts, 3)
}

func (j *fixedJob) find(uuid string) *fixedHost {
	for _, h := range j.hosts {
		if h.uuid == uuid {
			return h
		}
	}
	return nil
}

// passes lets time pass. All processes are heard.
func (j *fixedJob) passes(d time.Duration) {
	j.sleep(d)
	for _, h := range j.hosts {
		j.hear(h)
	}
	j.check()
}
