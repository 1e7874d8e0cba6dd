package monitor

import (
	"context"
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
	ask func(context.Context) (*cluster.Status, error)

	mu   sync.Mutex
	last *Job
}

// NewSource returns a Source that asks the agent's job.
func NewSource(a *cluster.Agent) *Source { return &Source{ask: a.Status} }

// Job returns the state of the job. Rates refer to the state that was read before.
func (s *Source) Job(ctx context.Context) (*Job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && time.Since(s.last.Time) < fresh {
		return s.last, nil
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
