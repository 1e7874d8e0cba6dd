package monitor

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gochorus/chorus/cluster"
)

const (
	// fresh is the age up to which a state is given to several readers. Many readers then cost
	// the processes as much as one.
	fresh = 400 * time.Millisecond
	// maxInterval is the longest interval of a rate.
	maxInterval = 30 * time.Second
	// askTime limits a question to the coordinator.
	askTime = 5 * time.Second
)

// A Source answers with the state of a job.
type Source struct {
	job   string
	hosts int // that the job needs to start
	since time.Time

	mu   sync.Mutex
	ask  func(context.Context) (*cluster.Status, error) // nil until the hosts have joined
	host string
	last *Job
}

// NewSource returns a Source of a job that waits for its hosts. The name may be empty.
func NewSource(job string, hosts int) *Source {
	return &Source{job: job, hosts: hosts, since: time.Now()}
}

// Join makes the Source ask the agent: all hosts have joined.
func (s *Source) Join(a *cluster.Agent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ask, s.host = a.Status, a.Host()
}

// Host returns the name of this host in the job.
func (s *Source) Host() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.host
}

// joining returns the state of a job whose hosts have not joined.
func (s *Source) joining() *Job {
	j := &Job{Job: s.job, Time: time.Now(), Hosts: []string{}, Ranks: []Rank{}, Groups: []Group{}}
	if j.Job == "" {
		j.Job = "without a name"
	}
	j.Findings = []string{fmt.Sprintf("the job waits since %s for its hosts: it needs %d to start", seconds(time.Since(s.since)), s.hosts)}
	return j
}

// Job returns the state of the job. Rates refer to the state that was read before.
func (s *Source) Job(ctx context.Context) (*Job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && time.Since(s.last.Time) < fresh {
		return s.last, nil
	}
	if s.ask == nil {
		return s.joining(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	answer, err := s.ask(ctx)
	if err != nil {
		return nil, err
	}
	j := newJob(answer, time.Now())
	if s.last != nil && j.Time.Sub(s.last.Time) <= maxInterval {
		j.setRates(s.last)
	}
	s.last = j
	return j, nil
}
