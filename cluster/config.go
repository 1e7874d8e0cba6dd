package cluster

import (
	"cmp"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/env"
)

// Timing says how long the members of a job wait. The zero value of a field
// takes the environment's value, and without one the default.
type Timing struct {
	Join      time.Duration // for all to come; CHORUS_JOIN_TIMEOUT, 5 minutes
	Call      time.Duration // for a store call whose context has no deadline; CHORUS_CALL_TIMEOUT, 5 minutes
	Heartbeat time.Duration // between signs of life; CHORUS_HEARTBEAT, 500 ms
	LostAfter time.Duration // of silence until a process is lost; CHORUS_LOST_AFTER, 3 s
}

// complete fills in what is unset and checks the whole.
func (t Timing) complete() (Timing, error) {
	for _, f := range []struct {
		d *time.Duration
		v *env.Var
	}{
		{&t.Join, env.JoinTimeout}, {&t.Call, env.CallTimeout},
		{&t.Heartbeat, env.Heartbeat}, {&t.LostAfter, env.LostAfter},
	} {
		if *f.d == 0 {
			d, err := f.v.Duration()
			if err != nil {
				return t, badConfig("%v", err)
			}
			*f.d = d
		}
		if *f.d <= 0 {
			return t, badConfig("%s is %v: want more than 0", f.v.Name, *f.d)
		}
	}
	if t.LostAfter < 2*t.Heartbeat {
		return t, badConfig("lost after %v of silence with a heartbeat every %v: want at least twice the heartbeat", t.LostAfter, t.Heartbeat)
	}
	return t, nil
}

// Config describes one host's part of a job for Start. The zero value is a job
// on this host alone with one process.
type Config struct {
	// Job is the job's name, the same on all hosts. It may be empty for a job
	// on one host, which then gets a name of its own.
	Job string
	// Nodes is how many hosts the job has; 0 means 1.
	Nodes int
	// LocalSize is how many workers this host will have; 0 means 1.
	LocalSize int
	// NodeRank is this host's number. Nil leaves it to the coordinator, which
	// orders hosts by name. Either all hosts have one or none.
	NodeRank *int
	// Host is this host's name in messages and in the order of ranks; empty
	// means the system's.
	Host string
	// Seeds are the host:port addresses of the hosts that may coordinate, the
	// same on all hosts. The smallest one that is reachable does. A port may be
	// left out: DefaultPort. A job on one host needs none.
	Seeds []string
	// Bind is the IP, or IP:port, to listen on. Empty means the loopback and
	// any port for one host, and the seed's own address on a seed.
	Bind string
	// Advertise is the IP, or IP:port, under which others reach what listens
	// on Bind; empty means the same.
	Advertise string
	// Secret authenticates the members of the job to each other, at least 16
	// bytes; SecretFile names a file that has it. With neither, a job on one
	// host makes one up and a job on several is refused unless Insecure.
	Secret     []byte
	SecretFile string
	// Insecure lets a job on several hosts run without a secret.
	Insecure bool
	// NoGossip turns memberlist off; CHORUS_GOSSIP=no does, too. A job on one
	// host never has it: nothing waits for gossip.
	NoGossip bool
	// Timing has the time limits.
	Timing Timing
	// Notify is called with one line of text about every 5 s while others are
	// awaited, and when gossip has something to say. It must not block. Nil
	// means slog's default logger.
	Notify func(line string)
}

// insecure is what a user of Insecure is told.
const insecure = "warning: no secret protects this job: whoever reaches its ports can join it, stop it and run what its processes run"

// DefaultPort is the port of seeds that name none. memberlist's own is taken by
// other programs on many hosts.
const DefaultPort = "29477"

// complete returns a copy with defaults filled in, and the job's keys.
func (cfg *Config) complete() (Config, keys, error) {
	var c Config
	if cfg != nil {
		c = *cfg
	}
	c.Nodes, c.LocalSize = max(c.Nodes, 1), max(c.LocalSize, 1)
	if c.Host == "" {
		c.Host = hostName()
	}
	if c.Notify == nil {
		c.Notify = func(line string) { slog.Info("cluster: " + line) }
	}
	if err := cmp.Or(checkName("job", c.Job), checkName("host", c.Host)); err != nil {
		return c, keys{}, err
	}
	var err error
	if c.Timing, err = c.Timing.complete(); err != nil {
		return c, keys{}, err
	}
	if c.Nodes > 1 {
		if err := c.checkSeveral(); err != nil {
			return c, keys{}, err
		}
	}
	if c.NodeRank != nil && (*c.NodeRank < 0 || *c.NodeRank >= c.Nodes) {
		return c, keys{}, badConfig("node rank %d in a job of %s", *c.NodeRank, quantity(c.Nodes, unitHost))
	}
	secret, err := c.secret()
	if err != nil {
		return c, keys{}, err
	}
	if len(secret) == 0 {
		c.Notify(insecure)
	}
	if c.Job == "" {
		c.Job = newName()
	}
	k, err := deriveKeys(secret, c.Job)
	return c, k, err
}

// checkSeveral checks what a job on several hosts cannot do without.
func (cfg *Config) checkSeveral() error {
	switch {
	case len(cfg.Seeds) == 0:
		return badConfig("a job on %d hosts has no seeds: name at least one host:port with --seeds or %s", cfg.Nodes, env.Seeds.Name)
	case cfg.Job == "":
		return badConfig("a job on %d hosts has no name: give all hosts the same with --job or %s", cfg.Nodes, env.Job.Name)
	case len(cfg.Secret) == 0 && cfg.SecretFile == "" && !cfg.Insecure:
		return badConfig("a job on %d hosts has no secret: give all hosts the same with --secret-file or %s, or accept that anyone may join it with --insecure", cfg.Nodes, env.SecretFile.Name)
	}
	return nil
}

func (cfg *Config) secret() ([]byte, error) {
	switch {
	case len(cfg.Secret) > 0:
		if err := checkSecret(cfg.Secret); err != nil {
			return nil, badConfig("Config.Secret: %v", err)
		}
		return cfg.Secret, nil
	case cfg.SecretFile != "":
		return readSecretFile(cfg.SecretFile)
	case cfg.Nodes > 1:
		return nil, nil // Insecure
	}
	return randomBytes(keyBytes), nil
}

// hostName returns CHORUS_HOST or the system's name for this host.
func hostName() string {
	if h := env.HostName.Value(); h != "" {
		return h
	}
	h, err := os.Hostname()
	if err != nil || h == "" {
		return "localhost"
	}
	return h
}

// splitAddr splits host:port or host, IPv6 with or without brackets.
func splitAddr(s, defaultPort string) (hostPart, port string, err error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return "", "", errors.New("empty address")
	}
	if net.ParseIP(s) != nil {
		return s, defaultPort, nil
	}
	if !strings.Contains(s, ":") {
		return s, defaultPort, nil
	}
	h, p, err := net.SplitHostPort(s)
	if err != nil {
		return "", "", err
	}
	return h, p, nil
}
