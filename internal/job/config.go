package job

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/env"
)

// Timing holds the time limits of a job. A zero field means the value of the
// environment variable or, if that is unset, the default.
type Timing struct {
	Join      time.Duration // for all members to join; CHORUS_JOIN_TIMEOUT, 5 minutes
	Call      time.Duration // for a store call whose context has no deadline; CHORUS_CALL_TIMEOUT, 5 minutes
	Heartbeat time.Duration // interval of heartbeats; CHORUS_HEARTBEAT, 500 ms
	LostAfter time.Duration // silence after which a process is lost; CHORUS_LOST_AFTER, 3 s
	Revoke    time.Duration // for the function of Run to return after the end of its epoch; CHORUS_REVOKE_TIMEOUT, 15 s
	Drain     time.Duration // for a planned change to wait for the end of a step; CHORUS_DRAIN_TIMEOUT, 30 s
	Backoff   time.Duration // before the second of several restarts; CHORUS_BACKOFF, 1 s
}

// CompleteTiming fills in unset fields and validates the result.
func CompleteTiming(t Timing) (Timing, error) {
	for _, f := range []struct {
		d *time.Duration
		v *env.Var
	}{
		{&t.Join, env.JoinTimeout}, {&t.Call, env.CallTimeout},
		{&t.Heartbeat, env.Heartbeat}, {&t.LostAfter, env.LostAfter}, {&t.Backoff, env.Backoff},
		{&t.Revoke, env.RevokeTimeout}, {&t.Drain, env.DrainTimeout},
	} {
		if *f.d == 0 {
			d, err := f.v.Duration()
			if err != nil {
				return t, BadConfig("%v", err)
			}
			*f.d = d
		}
		if *f.d <= 0 {
			return t, BadConfig("%s is %v: want more than 0", f.v.Name, *f.d)
		}
	}
	if t.LostAfter < 2*t.Heartbeat {
		return t, BadConfig("lost after %v of silence with a heartbeat every %v: want at least twice the heartbeat", t.LostAfter, t.Heartbeat)
	}
	return t, nil
}

// Config describes one host of a job for Start. The zero value is a job with one
// process on this host.
type Config struct {
	// Job is the name of the job, the same on all hosts. A job on one host may
	// omit it and then gets a generated name.
	Job string
	// Nodes is the number of hosts in the job, or the greatest number. 0 means 1, unless another
	// launcher has started several processes, such as srun or mpirun: then Start fails, because each
	// of them would be a job of its own.
	Nodes int
	// MinNodes is the number of hosts with which the job starts, and goes on after a loss,
	// if no more come; 0 means Nodes. If the program calls Run, later hosts join at the end
	// of a step. Otherwise they wait for the next restart.
	MinNodes int
	// LocalSize is the number of workers on this host; 0 means 1.
	LocalSize int
	// NodeRank is the index of this host. If it is nil on all hosts, the
	// coordinator orders the hosts by name. Set it on all hosts or on none.
	NodeRank *int
	// MaxRestarts is how often the processes of the job are started again after a
	// failure, the same on all hosts. The first restart follows at once, the others after
	// Timing.Backoff, which doubles each time up to 64 times its value. Workers that are killed
	// because their host is excluded do not count.
	MaxRestarts int
	// Host is the name of this host in messages, and orders the ranks;
	// empty means the system's host name.
	Host string
	// Seeds are the host:port addresses of the hosts that may coordinate at the start, the
	// same on all hosts. The smallest reachable seed coordinates. The port
	// defaults to 29477. A job on one host does not need seeds. After the loss of the coordinator
	// of an elastic job, any host may coordinate, seeds first.
	Seeds []string
	// Bind is the IP or IP:port to listen on. If it is empty, a job on one host
	// listens on the loopback at any port, and a seed on its own address.
	Bind string
	// Advertise is the IP or IP:port at which other hosts reach Bind; empty
	// means the same address as Bind.
	Advertise string
	// Secret authenticates the members of the job to each other, with at least
	// 16 bytes; SecretFile is a file with the secret. Without both, a job on one
	// host generates a secret, and a job on several hosts needs Insecure.
	Secret     []byte
	SecretFile string
	// Insecure permits a job on several hosts without a secret.
	Insecure bool
	// NoGossip disables memberlist, like CHORUS_GOSSIP=no. A job on one host
	// never uses it. No operation waits for gossip.
	NoGossip bool
	// Unfit is a reason why this host cannot take part, such as a program that is missing. The
	// join then fails on all hosts with a *RefusedError, instead of at their time limit.
	Unfit string
	// Timing holds the time limits.
	Timing Timing
	// Notify is called with one line of text about every 5 s while members are
	// missing, and with news from gossip. It must not block. Nil means slog's
	// default logger.
	Notify func(line string)

	Sys *System
}

// Insecure is the warning for users of Insecure.
const Insecure = "warning: this job has no secret: anyone with access to its ports can join it, stop it and run code in its processes"

// DefaultPort is the port of seeds without a port. memberlist's default port is
// often taken.
const DefaultPort = "29477"

// Complete returns a copy with defaults, and the keys of the job.
func (cfg *Config) Complete() (Config, keys, error) {
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if c.Nodes == 0 {
		if err := checkOneJob(os.LookupEnv); err != nil {
			return c, keys{}, err
		}
	}
	c.Nodes, c.LocalSize, c.MaxRestarts = max(c.Nodes, 1), max(c.LocalSize, 1), max(c.MaxRestarts, 0)
	if c.MinNodes == 0 {
		c.MinNodes = c.Nodes
	}
	if c.Host == "" {
		c.Host = HostName()
	}
	if c.Notify == nil {
		c.Notify = func(line string) { slog.Info("cluster: " + line) }
	}
	if err := cmp.Or(CheckName("job", c.Job), CheckName("host", c.Host)); err != nil {
		return c, keys{}, err
	}
	var err error
	if c.Timing, err = CompleteTiming(c.Timing); err != nil {
		return c, keys{}, err
	}
	switch {
	case c.Nodes > MaxSize:
		return c, keys{}, BadConfig("a job on %d hosts: want at most %d", c.Nodes, MaxSize)
	case c.LocalSize > maxLocalSize:
		return c, keys{}, BadConfig("%d processes on this host: want at most %d", c.LocalSize, maxLocalSize)
	case c.Nodes*c.LocalSize > MaxSize:
		return c, keys{}, BadConfig("%d processes on each of %d hosts: a job has at most %d processes", c.LocalSize, c.Nodes, MaxSize)
	}
	if c.Nodes > 1 {
		if err := c.checkSeveral(); err != nil {
			return c, keys{}, err
		}
	}
	if c.MinNodes < 1 || c.MinNodes > c.Nodes {
		return c, keys{}, BadConfig("at least %d of at most %s: want a range such as 2:4", c.MinNodes, quantity(c.Nodes, unitHost))
	}
	if c.NodeRank != nil && (*c.NodeRank < 0 || *c.NodeRank >= c.Nodes) {
		return c, keys{}, BadConfig("node rank %d in a job of %s", *c.NodeRank, quantity(c.Nodes, unitHost))
	}
	secret, err := c.secret()
	if err != nil {
		return c, keys{}, err
	}
	if len(secret) == 0 {
		c.Notify(Insecure)
	}
	if c.Job == "" {
		c.Job = newName()
	}
	k, err := DeriveKeys(secret, c.Job)
	return c, k, err
}

// checkSeveral validates the settings that a job on several hosts needs.
func (cfg *Config) checkSeveral() error {
	switch {
	case len(cfg.Seeds) == 0:
		return BadConfig("a job on %d hosts has no seeds: name at least one host:port with --seeds or %s", cfg.Nodes, env.Seeds.Name)
	case cfg.Job == "":
		return BadConfig("a job on %d hosts has no name: set the same name on all hosts with --job or %s", cfg.Nodes, env.Job.Name)
	case len(cfg.Secret) == 0 && cfg.SecretFile == "" && !cfg.Insecure:
		return BadConfig("a job on %d hosts has no secret: set the same secret on all hosts with --secret-file or %s, or let anyone join with --insecure", cfg.Nodes, env.SecretFile.Name)
	}
	return nil
}

func (cfg *Config) secret() ([]byte, error) {
	switch {
	case len(cfg.Secret) > 0:
		if err := CheckSecret(cfg.Secret); err != nil {
			return nil, BadConfig("Config.Secret: %v", err)
		}
		return cfg.Secret, nil
	case cfg.SecretFile != "":
		return ReadSecretFile(cfg.SecretFile)
	case cfg.Nodes > 1:
		return nil, nil // Insecure
	}
	return RandomBytes(KeyBytes), nil
}

// HostName returns CHORUS_HOST or the system's host name.
func HostName() string {
	if h := env.HostName.Value(); h != "" {
		return h
	}
	h, err := os.Hostname()
	if err != nil || h == "" {
		return "localhost"
	}
	return h
}

// SplitAddr splits host:port or host. An IPv6 address has brackets if a port follows, and may have them
// otherwise.
func SplitAddr(s, defaultPort string) (hostPart, port string, err error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return "", "", errors.New("empty address")
	}
	inner := strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	if ParseIP(inner) != nil && (inner == s || len(inner) == len(s)-2) {
		return inner, defaultPort, nil
	}
	if !strings.Contains(s, ":") {
		return s, defaultPort, nil
	}
	h, p, err := net.SplitHostPort(s)
	if err == nil && strings.Contains(h, ":") && ParseIP(h) == nil {
		err = errors.New("not an IPv6 address")
	}
	if err != nil && (strings.Count(s, ":") > 1 || strings.Contains(s, "[")) {
		err = fmt.Errorf("want an IPv6 address as in [2001:db8::1]:%s", cmp.Or(defaultPort, "0"))
	}
	return h, p, err
}

// ParseIP is like net.ParseIP, but also accepts an IPv6 address with a zone, such as fe80::1%eth0, and
// returns it without the zone.
func ParseIP(s string) net.IP {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return nil
	}
	return a.AsSlice()
}

// Loopback returns the address at which processes of this host meet: IPv6's if the host has no IPv4.
var Loopback = sync.OnceValue(func() string {
	if here, four := (*System)(nil), net.IPv4(127, 0, 0, 1); !here.isLocal(four) && here.isLocal(net.IPv6loopback) {
		return net.IPv6loopback.String()
	}
	return "127.0.0.1"
})
