package job

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/status"
)

// A Status is the state of a job at one moment.
type Status struct {
	Job      string         `json:"job"`
	Epoch    int            `json:"epoch"`
	Restarts int            `json:"restarts"` // how often all processes were started again
	Hosts    []string       `json:"hosts"`    // by node
	Members  []MemberStatus `json:"members"`  // by rank
}

// A MemberStatus is the state of one process.
type MemberStatus struct {
	Member
	// State is "joining" if the process has not attached yet, "running", "lost", or "ended" if
	// it has left.
	State  string        `json:"state"`
	Silent time.Duration `json:"silent"` // since its last message to the coordinator
	// Report describes the process's collectives and memory as JSON. It is nil if the process
	// has not answered, and Missing then has the reason.
	Report  []byte `json:"report,omitempty"`
	Missing string `json:"missing,omitempty"`
}

const (
	// reportTime limits the time of a process to collect its report, and answerTime the time
	// until the coordinator answers without the report.
	reportTime = 600 * time.Millisecond
	answerTime = time.Second
	// maxReports limits the sum of all reports of a job, and maxStatus a status.
	maxReports = 16 << 20
	maxStatus  = 2 * maxReports
)

// Status asks all processes of the job for their progress. A process that does not answer
// within a second has no Report. The processes do nothing for it between two calls.
func (a *Agent) Status(ctx context.Context) (*Status, error) {
	k := a.Client()
	m, id, err := k.ask(ctx, k.open.Done(), Message{Kind: kindStatus, Epoch: FirstEpoch})
	if err != nil {
		k.drop(id)
		return nil, fmt.Errorf("cluster: status of job %q: %w", a.cfg.Job, err)
	}
	s, err := unpackStatus(m.Body)
	if err != nil {
		return nil, fmt.Errorf("cluster: status of job %q: the coordinator's answer: %w", a.cfg.Job, err)
	}
	return s, nil
}

// Coordinated returns the UUIDs of the hosts that the coordinator of this host
// knows, and whether it waits for processes. It returns nil if this host does
// not coordinate. It exists for simulations.
func (a *Agent) Coordinated() (hosts []string, waits bool) {
	a.mu.Lock()
	c := a.Coord
	a.mu.Unlock()
	if c == nil {
		return nil, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range slices.Concat(c.agents, c.late) {
		hosts = append(hosts, p.host.UUID)
	}
	return hosts, c.isElastic() && c.elastic.phase == phaseWait
}

// unpackStatus decodes the coordinator's answer.
func unpackStatus(b []byte) (*Status, error) {
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(z, maxStatus+1))
	if err == nil && len(text) > maxStatus {
		err = fmt.Errorf("more than %d bytes", maxStatus)
	}
	if err != nil {
		return nil, err
	}
	s := new(Status)
	if err := json.Unmarshal(text, s); err != nil {
		return nil, err
	}
	safe.Record(s)
	return s, nil
}

// pack encodes a status as one message, without the reports if it is too long
// with them.
func (s *Status) pack() []byte {
	for {
		var b bytes.Buffer
		z, _ := gzip.NewWriterLevel(&b, gzip.BestSpeed)             // the level is valid
		err := errors.Join(json.NewEncoder(z).Encode(s), z.Close()) // cannot fail: the fields have only texts, numbers and bytes
		if err == nil && b.Len() <= maxMessageBytes-messageHeadBytes {
			return b.Bytes()
		}
		if !slices.ContainsFunc(s.Members, func(m MemberStatus) bool { return m.Report != nil }) {
			return nil
		}
		for i := range s.Members {
			s.Members[i].Report, s.Members[i].Missing = nil, "the reports of all processes together are too long"
		}
	}
}

// An inquiry collects the reports of all processes. Agents that ask meanwhile get the same answer.
type inquiry struct {
	id      uint64
	askers  []asker
	waiting map[*peer]bool
	reports map[*peer][]byte
	tooLong map[*peer]int // bytes of the reports that were not kept
	most    int           // bytes of a report
}

// An asker is an agent, with the number of its request.
type asker struct {
	conn *conn
	id   uint64
}

// inquire begins an inquiry for an agent, or adds the agent to the current one.
func (s *Server) inquire(k *conn, id uint64) {
	if q := s.inquiry; q != nil {
		q.askers = append(q.askers, asker{k, id})
		return
	}
	s.lastInquiry++
	q := &inquiry{id: s.lastInquiry, askers: []asker{{k, id}}, waiting: map[*peer]bool{}, reports: map[*peer][]byte{}, tooLong: map[*peer]int{}}
	q.most = maxReports / max(len(s.workers), 1)
	s.inquiry = q
	for _, w := range s.workers {
		if w.state == peerJoined {
			q.waiting[w] = true
			s.do(send{[]*peer{w}, msg{kind: kindInquiry, epoch: FirstEpoch, id: q.id}})
		}
	}
	if len(q.waiting) == 0 {
		s.answerInquiry(q)
		return
	}
	time.AfterFunc(answerTime, func() {
		s.mu.Lock()
		defer s.unlock()
		s.answerInquiry(q)
	})
}

// reported handles the report of a worker.
func (s *Server) reported(p *peer, m Message) {
	q := s.inquiry
	if q == nil || m.ID != q.id || !q.waiting[p] {
		return // too late
	}
	delete(q.waiting, p)
	if q.reports[p] = m.Body; len(m.Body) > q.most {
		q.reports[p], q.tooLong[p] = nil, len(m.Body)
	}
	if len(q.waiting) == 0 {
		s.answerInquiry(q)
	}
}

// answerInquiry sends the status, which it compresses without the lock, to all
// agents that have asked.
func (s *Server) answerInquiry(q *inquiry) {
	if s.inquiry != q || s.closed {
		return
	}
	s.inquiry = nil
	x := s.status(q)
	s.wg.Go(func() {
		b := x.pack()
		for _, a := range q.askers {
			a.conn.send(Message{Kind: kindReply, Epoch: FirstEpoch, ID: a.id, Body: b})
		}
	})
}

// status returns the state of the job with the reports of an inquiry.
func (s *Server) status(q *inquiry) *Status {
	c, x := s.coordinator, &Status{Job: s.cfg.Job, Epoch: int(s.epoch)}
	var all []Member
	if c.plan != nil {
		x.Restarts = c.plan.Restarts
		for node, h := range c.plan.Hosts {
			x.Hosts = append(x.Hosts, h.Host)
			for local := range h.LocalSize {
				all = append(all, Member{Rank: len(all), LocalRank: local, LocalSize: h.LocalSize, Node: node, Host: h.Host})
			}
		}
	}
	if c.world != nil {
		all = c.world.Members
	}
	workers := map[int][]*peer{} // by rank, because a search for each member would hold the lock for long in a large job
	for _, p := range c.workers {
		workers[p.reg.Rank] = append(workers[p.reg.Rank], p)
	}
	now := s.now()
	for _, m := range all {
		x.Members = append(x.Members, s.memberStatus(m, workers[m.Rank], q, now))
	}
	return x
}

// memberStatus returns the state of a process, given the workers that have its
// rank.
func (s *Server) memberStatus(m Member, workers []*peer, q *inquiry, now instant) MemberStatus {
	at := slices.IndexFunc(workers, func(p *peer) bool {
		return m.PID == 0 || p.reg.PID == m.PID && p.reg.Host == m.Host
	})
	x := MemberStatus{Member: m, State: "joining"}
	lost := s.faults.lost
	switch {
	case lost != nil && !lost.Stop && lost.Rank == m.Rank:
		x.State, x.Missing = "lost", lost.Reason
		return x
	case at < 0 && s.world == nil:
		x.Missing = "it has not attached to the job yet"
		return x
	case at < 0:
		x.State, x.Missing = "lost", "it has left the world of the job"
		return x
	case workers[at].state != peerJoined:
		x.State, x.Missing = "ended", "it has left the job"
		return x
	}
	p := workers[at]
	x.State, x.PID, x.Silent = "running", p.reg.PID, now-p.heard
	switch r, ok := q.reports[p]; {
	case !ok:
		x.Missing = fmt.Sprintf("it did not answer within %v: it is stopped, busy or unreachable", answerTime)
	case q.tooLong[p] > 0:
		x.Missing = fmt.Sprintf("its report has %d bytes: a job of %d processes has room for %d", q.tooLong[p], len(s.workers), q.most)
	default:
		x.Report = r
	}
	return x
}

// A responder sends reports, one at a time.
type responder struct{ busy atomic.Bool }

// respond collects and sends a report on a separate goroutine.
func (k *Client) respond(m Message) {
	if !k.responder.busy.CompareAndSwap(false, true) {
		return // the last one has not ended
	}
	k.wg.Go(func() {
		defer k.responder.busy.Store(false)
		_ = k.Send(Message{Kind: kindReport, Epoch: FirstEpoch, ID: m.ID, Body: status.Take(reportTime)}) // an error means that the job has ended
	})
}
