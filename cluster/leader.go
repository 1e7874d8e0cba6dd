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
	Run   string `json:"run,omitempty"`   // the start of the job, which another start with the same name does not have
	Name  string `json:"name,omitempty"`  // such as "host a (pid 12)"
}

func (l leader) String() string { return fmt.Sprintf("%s in term %d", l.Name, l.Term) }

// leads returns the identity of the coordinator for its messages.
func (c *coordinator) leads() leader {
	return leader{Term: c.term, Agent: c.cfg.self.Agent, Run: c.run, Name: c.cfg.self.name()}
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
	if f := l.followed; f.Run != "" && by.Run != f.Run {
		return fmt.Errorf("%v is a candidate of another run of the job than that of %v", by, f)
	}
	if p := l.promised; by.Term < p.Term || by.Term == p.Term && by.Agent != p.Agent && p.Agent != "" {
		return fmt.Errorf("%v asks for a promise that was given to %v", by, p)
	}
	l.promised = by
	return nil
}

// follow checks that a coordinator leads the job. A term that another one has led, too, means that the job runs twice.
func (l *leadership) follow(by leader) error {
	switch p, f := l.promised, l.followed; {
	case f.Run != "" && by.Run != f.Run:
		return fmt.Errorf("cluster: %v leads another run of the job than %v", by, f)
	case by.Term < p.Term:
		return fmt.Errorf("cluster: %v does not coordinate the job any more: %v has replaced it", by, p)
	case by.Term == f.Term && by.Agent != f.Agent && f.Agent != "":
		return fmt.Errorf("cluster: two coordinators lead the job in one term: %v and %v: report this as a fault of Chorus", f, by)
	}
	l.promised, l.followed = by, by
	return nil
}

// epochsMustGrow returns the error of an epoch that does not come after the last one.
func epochsMustGrow(last uint64, by leader, next uint64, from leader) error {
	return fmt.Errorf("cluster: the job has two coordinators: %v has begun epoch %d, and %v comes with epoch %d: report this as a fault of Chorus", by, last, from, next)
}

// check refuses news that contradict themselves.
func (n *news) check() error {
	return checkMembership(n.Plan, n.Members, n.Voters, len(n.Plan.Hosts) > 0)
}

// check refuses charters that contradict themselves.
func (c *charter) check() error {
	if c.Epoch < firstEpoch {
		return fmt.Errorf("epoch %d: epochs start with %d", c.Epoch, firstEpoch)
	}
	for _, p := range c.Proposed {
		if err := checkMembership(plan{}, nil, p.Voters, false); err != nil || p.Epoch < firstEpoch || len(p.Voters) == 0 {
			return fmt.Errorf("a proposal of epoch %d has %d hosts: %w", p.Epoch, len(p.Voters), err)
		}
	}
	return checkMembership(c.Plan, c.Members, c.Voters, len(c.Plan.Hosts) > 0)
}

// checkMembership checks that members have hosts, and that each host decides once.
func checkMembership(p plan, ms []Member, voters electorate, hasPlan bool) error {
	for _, m := range ms {
		if m.Node < 0 || m.Node >= len(p.Hosts) {
			return fmt.Errorf("rank %d is on host number %d of %d", m.Rank, m.Node, len(p.Hosts))
		}
	}
	seen := map[string]bool{}
	for _, u := range voters {
		if seen[u] {
			return fmt.Errorf("host %q decides twice", u)
		}
		if seen[u] = true; hasPlan && p.nodeOf(u) < 0 {
			return fmt.Errorf("host %q decides, and is not a host of the job", u)
		}
	}
	return nil
}
