package cluster

import "fmt"

// firstTerm is the term of the coordinator that starts a job. Each takeover has a greater one.
const firstTerm = 1

// A leader identifies a coordinator. A term has at most one coordinator that begins epochs, and agents
// follow only terms that are at least the greatest that they know. A coordinator that others have
// replaced can therefore win no host back.
type leader struct {
	Term  uint64 `json:"term,omitempty"`
	Agent string `json:"agent,omitempty"` // UUID of its agent
	Name  string `json:"name,omitempty"`  // such as "host a (pid 12)"
}

func (l leader) String() string { return fmt.Sprintf("%s in term %d", l.Name, l.Term) }

// leads returns the identity of the coordinator for its messages.
func (c *coordinator) leads() leader {
	return leader{Term: c.term, Agent: c.cfg.self.Agent, Name: c.cfg.self.name()}
}

// name names the process of a coordinator.
func (w welcome) name() string { return fmt.Sprintf("host %s (pid %d)", w.Host, w.PID) }

// A leadership is the coordinators that a process has met.
type leadership struct {
	promised leader // of the greatest term that the process has followed or voted for
	followed leader // the last that has led it
}

// vote promises to ignore coordinators of smaller terms than by's, unless that would break an earlier promise.
func (l *leadership) vote(by leader) error {
	if p := l.promised; by.Term < p.Term || by.Term == p.Term && by.Agent != p.Agent && p.Agent != "" {
		return fmt.Errorf("%v asks for a promise that was given to %v", by, p)
	}
	l.promised = by
	return nil
}

// follow checks that a coordinator leads the job. A term that another one has led, too, means that the job runs twice.
func (l *leadership) follow(by leader) error {
	switch p, f := l.promised, l.followed; {
	case by.Term < p.Term:
		return fmt.Errorf("cluster: %v does not coordinate the job any more: %v has replaced it", by, p)
	case by.Term == f.Term && by.Agent != f.Agent && f.Agent != "":
		return fmt.Errorf("cluster: two coordinators lead the job in one term: %v and %v: please report this", f, by)
	}
	l.promised, l.followed = by, by
	return nil
}

// epochsMustGrow returns the error of an epoch that does not come after the last one.
func epochsMustGrow(last uint64, by leader, next uint64, from leader) error {
	return fmt.Errorf("cluster: the job has two coordinators: %v has begun epoch %d, and %v comes with epoch %d: please report this", by, last, from, next)
}
