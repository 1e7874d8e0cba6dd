package job

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/gochorus/chorus/internal/safe"
)

const (
	// gossipPortOffset is added to the port of a seed to get its gossip port:
	// memberlist needs exclusive use of TCP and UDP on a port.
	gossipPortOffset = 1
	// rejoinEvery is the interval of attempts to join hosts that gossip does not
	// see. memberlist alone does not heal a partition that outlives its suspicion
	// timeout.
	rejoinEvery = 5 * time.Second
)

// A gossip is this host's member of the gossip of one run of the job. It provides only hints: the liveness and the
// addresses of hosts as seen by others. Errors are reported once and have no other effect.
type gossip struct {
	sys       *System
	cfg       *memberlist.Config
	Transport *gossipTransport
	at        string                 // address for other hosts
	ML        *memberlist.Memberlist // nil before begin
	self      gossipMeta
	tag       string
	join      []string // the seeds' gossip addresses
	quit      chan struct{}
	wg        sync.WaitGroup

	mu    sync.Mutex // not held during calls of memberlist
	hosts map[string]hostState
}

// A hostState is the latest state of a host in gossip.
type hostState struct {
	meta  gossipMeta
	addr  string
	alive bool
}

// gossipMeta is memberlist's node meta, which is limited in size.
type gossipMeta struct {
	Tag  string `json:"j"` // tag of the job
	UUID string `json:"u"` // unique for each start of an agent
	Host string `json:"h"` // host name, possibly truncated
}

const maxMetaHost = 128

func (m gossipMeta) encode() []byte {
	if len(m.Host) > maxMetaHost {
		m.Host = m.Host[:maxMetaHost]
	}
	b, err := json.Marshal(m)
	if err != nil { // cannot fail: it contains only text
		panic("cluster: " + err.Error())
	}
	return b
}

func decodeMeta(b []byte) (gossipMeta, error) {
	var m gossipMeta
	if len(b) > memberlist.MetaMaxSize {
		return m, fmt.Errorf("node meta of %d bytes", len(b))
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, err
	}
	m.Host = safe.Text(m.Host)
	if m.UUID == "" || m.Tag == "" {
		return m, errors.New("node meta without a job or an identity")
	}
	return m, nil
}

// openGossip opens the port of gossip, which takes control connections at once. If that fails, it reports why and returns nil.
func openGossip(a *Agent, seeds []string, mine string) *gossip {
	tag := JobTag(a.cfg.Job)
	g := &gossip{
		sys:   a.cfg.Sys,
		tag:   fmt.Sprintf("%x", tag),
		self:  gossipMeta{Tag: fmt.Sprintf("%x", tag), UUID: a.UUID, Host: a.cfg.Host},
		quit:  make(chan struct{}),
		hosts: map[string]hostState{},
	}
	for _, s := range seeds {
		if s != mine {
			g.join = append(g.join, gossipAddr(s))
		}
	}
	var err error
	if g.cfg, err = g.config(a, seeds, mine); err != nil {
		g.notAvailable(a, err)
		return nil
	}
	return g
}

func (g *gossip) notAvailable(a *Agent, err error) {
	a.notify(fmt.Sprintf("gossip is not available on this host, so that reports of lost hosts say less: %v", err))
}

// begin starts gossip with the hosts of a run of the job, whose number this
// host has learned from the coordinator, or reports why it cannot.
func (g *gossip) begin(a *Agent, run string) {
	ks, err := a.keys.ofGossip(run)
	if err == nil {
		err = g.Transport.begin(ks)
	}
	if err == nil {
		g.cfg.Label, g.cfg.SecretKey = ks.label, ks.key
		g.ML, err = memberlist.Create(g.cfg)
	}
	if err != nil {
		g.notAvailable(a, err)
		return
	}
	g.wg.Go(g.joinLoop)
}

// gossipAddr returns the gossip address of a seed.
func gossipAddr(seed string) string {
	h, p, _ := net.SplitHostPort(seed)
	n, _ := strconv.Atoi(p)
	return net.JoinHostPort(h, strconv.Itoa(n+gossipPortOffset))
}

// config detects a dead host within 3 to 5 s on a network with up to 10 % packet
// loss. It does not use memberlist's local defaults, because their view of a
// cluster converges slowly.
func (g *gossip) config(a *Agent, seeds []string, mine string) (*memberlist.Config, error) {
	ip, err := ownIP(&a.cfg, seeds, mine)
	if err != nil {
		return nil, err
	}
	c := memberlist.DefaultLANConfig()
	c.Name = a.cfg.Host + "/" + a.UUID
	if own := a.cfg.Sys.ownAddress(); a.byOwnName && own != nil {
		ip, c.AdvertiseAddr = net.IPv4zero.String(), own.String()
	}
	c.BindAddr, c.BindPort, c.AdvertisePort = ip, 0, 0
	if mine != "" {
		c.BindPort = portOf(mine) + gossipPortOffset
		c.AdvertisePort = c.BindPort
	}
	if adv, _, err := SplitAddr(a.cfg.Advertise, ""); err == nil {
		c.AdvertiseAddr = adv
	}
	c.EnableCompression = false // the messages are tiny
	c.DelegateProtocolVersion, c.DelegateProtocolMin, c.DelegateProtocolMax = 1, 1, 1
	c.Delegate, c.Events, c.Alive, c.Merge, c.Conflict = g, g, g, g, g
	c.Logger = log.New(gossipLog{}, "", 0)
	c.ProbeInterval, c.ProbeTimeout = 500*time.Millisecond, 250*time.Millisecond
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 4, 3
	c.GossipInterval, c.PushPullInterval = 100*time.Millisecond, 10*time.Second
	c.TCPTimeout, c.AwarenessMaxMultiplier = 3*time.Second, 4
	c.DeadNodeReclaimTime = time.Second
	t, err := newGossipTransport(ip, c.BindPort, a.port.limiter, a.notify, a.port.take)
	if err != nil {
		return nil, err
	}
	c.Transport, c.BindPort, c.AdvertisePort = t, t.port(), t.port()
	adv, port, err := t.FinalAdvertiseAddr(c.AdvertiseAddr, c.AdvertisePort)
	if err != nil {
		_ = t.Shutdown()
		return nil, err
	}
	g.Transport, g.at = t, net.JoinHostPort(adv.String(), strconv.Itoa(port))
	return c, nil
}

// ownIP returns the address for gossip: the address to listen on, or the local
// address of the route to the first seed.
func ownIP(cfg *Config, seeds []string, mine string) (string, error) {
	if ip, _, err := SplitAddr(cfg.Bind, ""); err == nil && !ParseIP(ip).IsUnspecified() {
		return ip, nil
	}
	h, _, _ := net.SplitHostPort(mine)
	if ip := ParseIP(h); ip != nil {
		return h, nil
	}
	// A connected UDP socket sends nothing, but it has the local address of the route.
	c, err := net.DialTimeout("udp", seeds[0], DialAttempt)
	if err != nil {
		return "", fmt.Errorf("find this host's address: %w", err)
	}
	defer c.Close()
	return addrIP(c.LocalAddr()), nil
}

// joinLoop joins hosts that gossip does not see, one at a time.
func (g *gossip) joinLoop() {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, rejoinEvery) {
		if addr := g.unseen(); addr != "" {
			// The next attempt finds the same error.
			_, _ = g.ML.Join([]string{addr})
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-g.quit:
			t.Stop()
			return
		}
	}
}

// unseen returns the address of a seed, or of a host seen before, that is not
// alive.
func (g *gossip) unseen() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	alive := map[string]bool{}
	for _, s := range g.hosts {
		if s.alive {
			alive[s.addr] = true
		}
	}
	var out []string
	for _, addr := range g.join {
		h, p, _ := net.SplitHostPort(addr)
		for _, ip := range g.sys.resolve(context.Background(), h) {
			if at := net.JoinHostPort(ip.String(), p); !alive[at] {
				out = append(out, at)
			}
		}
	}
	for _, s := range g.hosts {
		if !s.alive && s.meta.UUID != g.self.UUID {
			out = append(out, s.addr)
		}
	}
	if len(out) == 0 {
		return ""
	}
	return out[rand.IntN(len(out))]
}

// addrOf returns the gossip address of a host, or "" if gossip has not seen it.
func (g *gossip) addrOf(uuid string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.hosts[uuid].addr
}

// path describes what gossip knows about a host after its connection to us was lost.
func (g *gossip) path(h host) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s, known := g.hosts[h.UUID]; known && !s.alive {
		return "gossip lost the host, too"
	}
	return "" // gossip notices a dead host seconds later
}

func (g *gossip) close() {
	close(g.quit)
	if g.ML != nil {
		// Best effort: the other hosts learn of the end of this host from the coordinator.
		_ = g.ML.Leave(250 * time.Millisecond)
		_ = g.ML.Shutdown()
	}
	_ = g.Transport.Shutdown()
	g.wg.Wait()
}

// see records an event of memberlist about a node. It runs under memberlist's
// lock, so it only copies.
func (g *gossip) see(n *memberlist.Node, alive bool) {
	m, err := decodeMeta(n.Meta)
	if err != nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hosts[m.UUID] = hostState{m, n.Address(), alive}
}

// NotifyJoin, NotifyUpdate and NotifyLeave implement memberlist's EventDelegate.
func (g *gossip) NotifyJoin(n *memberlist.Node) { g.see(n, true) }

func (g *gossip) NotifyUpdate(n *memberlist.Node) { g.see(n, true) }

func (g *gossip) NotifyLeave(n *memberlist.Node) { g.see(n, false) }

// NotifyAlive implements memberlist's AliveDelegate and rejects nodes of other jobs.
func (g *gossip) NotifyAlive(n *memberlist.Node) error {
	m, err := decodeMeta(n.Meta)
	if err != nil {
		return err
	}
	if m.Tag != g.tag {
		return errOtherJob
	}
	return nil
}

// NotifyMerge implements memberlist's MergeDelegate and rejects nodes of other jobs.
func (g *gossip) NotifyMerge(ns []*memberlist.Node) error {
	for _, n := range ns {
		if err := g.NotifyAlive(n); err != nil {
			return err
		}
	}
	return nil
}

// NotifyConflict implements memberlist's ConflictDelegate. Names contain an
// agent's UUID, so conflicts do not happen.
func (g *gossip) NotifyConflict(_, _ *memberlist.Node) {}

// NodeMeta and the following methods implement memberlist's Delegate; only the meta is used.
func (g *gossip) NodeMeta(limit int) []byte {
	b := g.self.encode()
	if len(b) > limit {
		return nil // other hosts reject this node, which is better than a panic here
	}
	return b
}

func (g *gossip) NotifyMsg([]byte) {}

func (g *gossip) GetBroadcasts(_, _ int) [][]byte { return nil }

func (g *gossip) LocalState(bool) []byte { return nil }

func (g *gossip) MergeRemoteState(_ []byte, _ bool) {}

// gossipLog writes memberlist's log at debug level: it is about retries, which do
// not concern the user.
type gossipLog struct{}

func (gossipLog) Write(b []byte) (int, error) {
	slog.Debug("cluster: gossip", "detail", strings.TrimSpace(string(b)))
	return len(b), nil
}
