package nccl

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

func (l *lib) GetUniqueID() (ncclapi.UniqueID, ncclapi.Result) {
	if r := l.enter(ncclapi.FuncGetUniqueID); r != ncclapi.Success {
		return ncclapi.UniqueID{}, r
	}
	id, err := l.startRoot()
	if err != nil {
		return id, l.refuse(ncclapi.SystemError, "ncclGetUniqueId: %v", err)
	}
	return id, ncclapi.Success
}

// CommInitRankScalable uses the meeting of the first id.
func (l *lib) CommInitRankScalable(out *ncclapi.Comm, nranks, rank int32, ids []ncclapi.UniqueID, cfg *ncclapi.Config) ncclapi.Result {
	const f = ncclapi.FuncCommInitRankScalable
	if len(ids) == 0 || len(ids) > int(nranks) {
		return l.refuse(ncclapi.InvalidArgument, "%s: %d unique ids for %d ranks", f.Name(), len(ids), nranks)
	}
	return l.initRank(f, out, nranks, rank, &ids[0], cfg)
}

func (l *lib) initRank(f ncclapi.Func, out *ncclapi.Comm, nranks, rank int32, id *ncclapi.UniqueID, cfg *ncclapi.Config) ncclapi.Result {
	dev, r := l.takeDevice(f)
	if fault := l.enter(f); fault != ncclapi.Success {
		r = fault
	}
	if r == ncclapi.Success {
		r = l.checkInit(f, out, nranks, rank, cfg)
	}
	t, address, err := parseID(id)
	if err != nil && r == ncclapi.Success {
		r = l.refuse(ncclapi.InvalidArgument, "%s: %v", f.Name(), err)
	}
	if r != ncclapi.Success {
		return l.failGroup(r)
	}
	name := nameOf(cfg)
	return l.later(func() ncclapi.Result {
		j := &joiner{Ranks: int(nranks), Rank: int(rank), Key: int(rank)}
		return l.make(f, out, dev, t, address, t, j, name)
	})
}

func (l *lib) checkInit(f ncclapi.Func, out *ncclapi.Comm, nranks, rank int32, cfg *ncclapi.Config) ncclapi.Result {
	switch {
	case out == nil:
		return l.refuse(ncclapi.InvalidArgument, "%s: the pointer to the communicator is null", f.Name())
	case nranks < 1 || rank < 0 || rank >= nranks:
		return l.refuse(ncclapi.InvalidArgument, "%s: rank %d of %d", f.Name(), rank, nranks)
	}
	return l.checkConfig(f, cfg)
}

// checkConfig rejects the values that NCCL would reject, and nonblocking
// communicators, which virtual devices do not support.
func (l *lib) checkConfig(f ncclapi.Func, cfg *ncclapi.Config) ncclapi.Result {
	switch {
	case cfg == nil:
		return ncclapi.Success
	case cfg.Magic != ncclapi.ConfigMagic:
		return l.refuse(ncclapi.InvalidArgument, "%s: the configuration is not initialised", f.Name())
	case cfg.Size != ncclapi.NewConfig(l.cfg.Version).Size || cfg.Version > uint32(l.cfg.Version):
		// NCCL would truncate the value silently.
		return l.refuse(ncclapi.InvalidArgument, "%s: the configuration is of another version: %d bytes for %s",
			f.Name(), cfg.Size, ncclapi.VersionText(int32(cfg.Version)))
	case cfg.Blocking == 0:
		return l.refuse(ncclapi.InvalidUsage, "%s: virtual devices support only blocking communicators", f.Name())
	}
	if bad := badConfig(cfg, l.cfg.Version); bad != "" {
		return l.refuse(ncclapi.InvalidArgument, "%s: %s", f.Name(), bad)
	}
	if cfg.NetName == nil {
		return ncclapi.Success
	}
	if net := dl.GoString(uintptr(unsafe.Pointer(cfg.NetName))); !slices.ContainsFunc(networks, func(known string) bool { return strings.EqualFold(net, known) }) {
		return l.refuse(ncclapi.InvalidUsage, "%s: no network has the name %q: want one of %v", f.Name(), net, networks)
	}
	return ncclapi.Success
}

// nameOf returns the name in a configuration, or "".
func nameOf(cfg *ncclapi.Config) string {
	if cfg == nil || cfg.CommName == nil {
		return ""
	}
	return dl.GoString(uintptr(unsafe.Pointer(cfg.CommName)))
}

// networks are the networks that NCCL has without a plugin.
var networks = []string{"IB", "Socket"}

// badConfig returns the value of a configuration that NCCL refuses, or "" (parseCommConfig of NCCL
// 2.28). A maximum that is not defined is less than every minimum.
func badConfig(c *ncclapi.Config, version int32) string {
	policy := int32(2)
	if version >= sinceRevoke {
		policy = policies
	}
	for _, f := range []struct {
		name     string
		value    int32
		from, to int32
	}{
		{"blocking", c.Blocking, 0, 1},
		{"cgaClusterSize", c.CGAClusterSize, 0, math.MaxInt32},
		{"minCTAs", c.MinCTAs, 1, math.MaxInt32},
		{"maxCTAs", c.MaxCTAs, 1, math.MaxInt32},
		{"splitShare", c.SplitShare, 0, 1},
		{"collnetEnable", c.CollnetEnable, 0, 1},
		{"CTAPolicy", c.CTAPolicy, 0, policy},
		{"shrinkShare", c.ShrinkShare, 0, 1},
		{"nvlsCTAs", c.NVLSCTAs, 1, math.MaxInt32},
		{"nChannelsPerNetPeer", c.NChannelsPerNetPeer, 1, mostCTAs},
		{"nvlinkCentricSched", c.NVLinkCentricSched, 0, 1},
		{"graphUsageMode", c.GraphUsageMode, 0, 2},
	} {
		switch {
		case inRange(f.value, f.from, f.to):
		case f.to == math.MaxInt32:
			return fmt.Sprintf("%s is %d: want %d or more", f.name, f.value, f.from)
		default:
			return fmt.Sprintf("%s is %d: want %d to %d", f.name, f.value, f.from, f.to)
		}
	}
	switch {
	case c.MinCTAs <= c.MaxCTAs:
		return ""
	case c.MaxCTAs == ncclapi.Undefined:
		return fmt.Sprintf("minCTAs is %d without maxCTAs: want both", c.MinCTAs)
	}
	return fmt.Sprintf("minCTAs is %d and maxCTAs %d", c.MinCTAs, c.MaxCTAs)
}

// sinceRevoke is the first version after 2.28.3, whose CTA policies are flags.
const sinceRevoke = 22807

// failGroup fails the thread's open group, if there is one.
func (l *lib) failGroup(r ncclapi.Result) ncclapi.Result {
	if l.groups.open() == nil {
		return r
	}
	return l.submit(nil, r)
}

// make meets the other ranks at an address, authenticated by the token door, and
// creates a rank of the communicator with token t.
func (l *lib) make(f ncclapi.Func, out *ncclapi.Comm, dev *machine.Device, door token, address string, t token, j *joiner, name string) ncclapi.Result {
	if r := l.mayManage(f); r != ncclapi.Success {
		return r
	}
	if r := l.loadKernels(dev); r != ncclapi.Success {
		return l.refuse(r, "%s: device %d is lost", f.Name(), dev.Ordinal())
	}
	c, me, err := l.newComm(dev, t)
	if err != nil {
		return l.refuse(ncclapi.SystemError, "%s: %v", f.Name(), err)
	}
	c.name = name
	j.Member = me
	v, err := join(address, door, j)
	switch {
	case errors.Is(err, syscall.EMFILE):
		c.close(true)
		return l.refuse(ncclapi.SystemError, "%s at rank %d: cannot connect to the root: %v", f.Name(), j.Rank, err)
	case err != nil:
		c.close(true)
		return l.refuse(ncclapi.RemoteError, "%s at rank %d: the connection to the root was lost before all %d ranks had joined: %v",
			f.Name(), j.Rank, j.Ranks, err)
	case v.Result != ncclapi.Success:
		c.close(true)
		return l.refuse(v.Result, "%s: %s", f.Name(), v.Text)
	case v.Rank < 0:
		c.close(true)
		*out = 0
		return ncclapi.Success
	}
	if err := c.connect(v); err != nil {
		c.close(true)
		return l.refuse(ncclapi.RemoteError, "%s at rank %d: %v", f.Name(), v.Rank, err)
	}
	*out = l.adopt(c)
	return ncclapi.Success
}

// loadKernels waits for the device at its first communicator, because loading kernels does.
func (l *lib) loadKernels(dev *machine.Device) ncclapi.Result {
	l.m.Lock()
	defer l.m.Unlock()
	if !l.loaded[dev] {
		if l.m.Drain("the first communicator, which loads NCCL's kernels,", dev) != cudadrv.Success {
			return ncclapi.UnhandledCUDAError
		}
		l.loaded[dev] = true
	}
	return ncclapi.Success
}

// splitNoColor is NCCL_SPLIT_NOCOLOR.
const splitNoColor = -1

func (l *lib) CommSplit(h ncclapi.Comm, color, key int32, out *ncclapi.Comm, cfg *ncclapi.Config) ncclapi.Result {
	const f = ncclapi.FuncCommSplit
	c, r := l.parent(f, h, out, cfg)
	if r == ncclapi.Success && color < splitNoColor {
		r = l.refuse(ncclapi.InvalidArgument, "%s: %d is not a valid color", f.Name(), color)
	}
	if r != ncclapi.Success {
		return l.failGroup(r)
	}
	meeting := fmt.Sprintf("split %d", c.nextChild())
	t := c.token.derive(fmt.Sprintf("%s color %d", meeting, color))
	name := nameOf(cfg)
	return l.later(func() ncclapi.Result {
		j := &joiner{Meeting: meeting, Ranks: c.n, Rank: c.rank, Color: int(color), Key: int(key)}
		return l.make(f, out, c.dev, c.token, c.members[0].Address, t, j, name)
	})
}

// parent returns the communicator that another one is created from.
func (l *lib) parent(f ncclapi.Func, h ncclapi.Comm, out *ncclapi.Comm, cfg *ncclapi.Config) (*comm, ncclapi.Result) {
	if r := l.enter(f); r != ncclapi.Success {
		return nil, r
	}
	if out == nil {
		return nil, l.refuse(ncclapi.InvalidArgument, "%s: the pointer to the communicator is null", f.Name())
	}
	if r := l.checkConfig(f, cfg); r != ncclapi.Success {
		return nil, r
	}
	c, r := l.comm(f, h)
	// A child can also be created from a revoked communicator and, with CommShrink, after a loss.
	if r != ncclapi.Success || f == ncclapi.FuncCommShrink || c.isRevoked() {
		return c, r
	}
	return l.usable(f, h)
}

func (c *comm) nextChild() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.children++
	return c.children
}

// CommShrink creates a communicator of the ranks that are not excluded; only
// those call it. With ShrinkAbort it first stops the operations of the old
// communicator.
func (l *lib) CommShrink(h ncclapi.Comm, exclude []int32, out *ncclapi.Comm, cfg *ncclapi.Config, flags int32) ncclapi.Result {
	const f = ncclapi.FuncCommShrink
	c, r := l.parent(f, h, out, cfg)
	if r != ncclapi.Success {
		return l.failGroup(r)
	}
	survivors, bad := c.survivors(exclude)
	if bad == "" && flags != ncclapi.ShrinkDefault && flags != ncclapi.ShrinkAbort {
		bad = fmt.Sprintf("flags %d", flags)
	}
	if failed := c.state(); bad == "" && flags == ncclapi.ShrinkDefault && failed != nil {
		return l.failGroup(failed.Result)
	}
	if bad != "" {
		return l.failGroup(l.refuse(ncclapi.InvalidArgument, "%s at rank %d: %s", f.Name(), c.rank, bad))
	}
	if flags == ncclapi.ShrinkAbort {
		c.mu.Lock()
		c.halt()
		c.mu.Unlock()
	}
	meeting := fmt.Sprintf("shrink %d without %v", c.nextChild(), exclude)
	name := nameOf(cfg)
	return l.later(func() ncclapi.Result {
		me := slices.Index(survivors, c.rank)
		j := &joiner{Meeting: meeting, Ranks: len(survivors), Rank: me, Key: me}
		return l.make(f, out, c.dev, c.token, c.members[survivors[0]].Address, c.token.derive(meeting), j, name)
	})
}

// survivors returns the ranks that are not excluded, or why the list is invalid.
func (c *comm) survivors(exclude []int32) (ranks []int, bad string) {
	for _, x := range exclude {
		if x < 0 || int(x) >= c.n {
			return nil, fmt.Sprintf("the excluded rank %d is not one of %d ranks", x, c.n)
		}
	}
	for rank := range c.n {
		if !slices.Contains(exclude, int32(rank)) {
			ranks = append(ranks, rank)
		}
	}
	if len(exclude) == 0 || !slices.Contains(ranks, c.rank) {
		return nil, fmt.Sprintf("the list excludes this rank or is empty: %v", exclude)
	}
	return ranks, ""
}

// A token is a secret shared by the ranks of a communicator. A connection must
// present it.
type token [16]byte

func (t token) String() string { return hex.EncodeToString(t[:]) }

// derive returns the token of a communicator created from this one.
func (t token) derive(purpose string) token {
	sum := sha256.Sum256(append(t[:], purpose...))
	return token(sum[:16])
}

func randomToken() (t token) {
	_, _ = rand.Read(t[:]) // never fails
	return t
}

const idMagic = "chorusID"

// makeID packs a token and the address of its root into a unique id.
func makeID(t token, address string) (ncclapi.UniqueID, error) {
	var id ncclapi.UniqueID
	at := copy(id[:], idMagic)
	at += copy(id[at:], t[:])
	if len(address) > len(id)-at-1 {
		return id, errors.New("the address of the root is too long for a unique id: " + address)
	}
	id[at] = byte(len(address))
	copy(id[at+1:], address)
	return id, nil
}

func parseID(id *ncclapi.UniqueID) (t token, address string, err error) {
	rest, ok := strings.CutPrefix(string(id[:]), idMagic)
	if !ok {
		return t, "", errors.New("the unique id was not created by virtual devices")
	}
	rest = rest[copy(t[:], rest):]
	if n := int(rest[0]); n < len(rest) {
		return t, rest[1 : 1+n], nil
	}
	return t, "", errors.New("the unique id is damaged")
}

// listen opens a listener at a new address: a network of package net, a space and
// an address. Unix sockets are abstract, so that no file remains if the process
// is killed.
func (l *lib) listen() (net.Listener, string, error) {
	network, where := "unix", "@chorus-"+randomToken().String()
	if l.cfg.Network == InProcess {
		d := newDoor()
		return d, InProcess + " " + d.Addr().String(), nil
	}
	if ip := l.cfg.Network; ip != "" {
		network, where = "tcp", net.JoinHostPort(ip, "0")
	}
	ln, err := net.Listen(network, where)
	if err != nil {
		return nil, "", withCure(err)
	}
	return ln, network + " " + ln.Addr().String(), nil
}

func dial(address string) (net.Conn, error) {
	network, where, _ := strings.Cut(address, " ")
	if network == InProcess {
		return enter(where)
	}
	conn, err := net.DialTimeout(network, where, greetTimeout)
	return conn, withCure(err)
}

// withCure adds what helps to the error of a process without file descriptors.
func withCure(err error) error {
	if errors.Is(err, syscall.EMFILE) {
		return fmt.Errorf("%w: raise the process's limit of open files (ulimit -n)", err)
	}
	return err
}

// SetEncryption validates the configuration. Ranks that meet over Unix sockets are on one host,
// where there is nothing to encrypt, and the connections over TCP are not encrypted, so it
// refuses a key there.
func (l *lib) SetEncryption(cfg *ncclapi.EncryptionConfig) ncclapi.Result {
	const f = ncclapi.FuncSetEncryption
	if r := l.enter(f); r != ncclapi.Success {
		return r
	}
	switch {
	case cfg == nil:
		return ncclapi.Success
	case cfg.Magic != ncclapi.ConfigMagic || cfg.Size != unsafe.Sizeof(*cfg):
		return l.refuse(ncclapi.InvalidArgument, "%s: the configuration is not initialised", f.Name())
	case cfg.Mode == ncclapi.EncryptionNone:
		return ncclapi.Success
	case cfg.Mode != ncclapi.EncryptionPSK:
		return l.refuse(ncclapi.InvalidArgument, "%s: mode %d does not exist", f.Name(), cfg.Mode)
	case cfg.PSK == nil || len(dl.GoString(uintptr(unsafe.Pointer(cfg.PSK)))) < ncclapi.MinPSK:
		return l.refuse(ncclapi.InvalidArgument, "%s: the key has less than %d bytes", f.Name(), ncclapi.MinPSK)
	case l.cfg.hosts():
		return l.refuse(ncclapi.InvalidUsage, "%s: virtual devices do not encrypt their connections over TCP", f.Name())
	}
	return ncclapi.Success
}
