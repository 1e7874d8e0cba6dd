package comm

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// InitConfig are the options of Init; nil means the defaults.
type InitConfig struct {
	// Group are the options of the group, as for Local and Join.
	Group *Config
	// Fallback permits virtual devices if CHORUS_BACKEND permits them and no GPU is visible.
	// Init then calls it on rank 0 with one line that the program must show to its user. nil
	// means that a missing GPU is an error.
	Fallback func(note string)
	// AllDevices gives a job of one process a rank on each device, as Local does. The
	// default is one rank on the first device. In a job of several processes each process
	// always has one rank.
	AllDevices bool
}

// Init joins this process to the job that started it and returns the group of
// all processes of the job, like torch.distributed.init_process_group. Init is
// cluster.Attach, the choice of the device, and Join in one call: the rank uses
// the device with the ordinal of its local rank, or the only device that the
// process sees. A process that no launcher has started gets a group of one
// rank, or of all devices; see InitConfig.
//
// Init returns when all processes have called it, or with the cause when ctx ends. If one
// process fails, Init closes the session and the group, and returns an error in all processes
// that names the failed rank. Shutdown and Close end the group and the session. Init can be
// called once in a process, like cluster.Attach.
func Init(ctx context.Context, cfg *InitConfig) (*Group, error) {
	if cfg == nil {
		cfg = new(InitConfig)
	}
	if err := cfg.Group.check("init"); err != nil {
		return nil, err
	}
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return nil, fmt.Errorf("comm: init: attach to the job: %w", err)
	}
	i := &initializing{cfg: cfg, sess: sess}
	g, err := i.group(ctx)
	if err != nil {
		return nil, errors.Join(err, sess.Close(), i.virtual.Close())
	}
	g.session = sess
	return g, nil
}

// JoinEnlisted waits until the registry begins the next world with this
// process, and returns the group of its members. It is Enlistment.World and
// Join in one call (the next rendezvous of torch's elastic agent). The session
// belongs to the group, as after Init: Shutdown and Close end both, while the
// enlistment goes on. If the error matches cluster.ErrDelisted, the enlistment
// is over. Otherwise that world has failed: call JoinEnlisted again.
func JoinEnlisted(ctx context.Context, m *cluster.Enlistment, dev *device.Device, cfg *Config) (*Group, error) {
	if m == nil {
		return nil, errors.New("comm: join: no enlistment given")
	}
	if err := cfg.check("join"); err != nil {
		return nil, err
	}
	sess, err := m.World(ctx)
	if err != nil {
		return nil, fmt.Errorf("comm: join: %w", err)
	}
	g, err := Join(ctx, sess, dev, cfg)
	if err != nil {
		return nil, errors.Join(err, sess.Close())
	}
	g.session = sess
	return g, nil
}

// Session returns the session that Init or JoinEnlisted has opened, with the job's store and members. It
// belongs to the group: do not close it. Session returns nil for a group of Join, Local or
// Split.
func (g *Group) Session() *cluster.Session {
	if g == nil {
		return nil
	}
	return g.session
}

// An initializing is one call of Init after this process has attached to its job.
type initializing struct {
	cfg     *InitConfig
	sess    *cluster.Session
	virtual *device.System // the devices of a fallback, or nil
}

func (i *initializing) group(ctx context.Context) (*Group, error) {
	if i.cfg.AllDevices && i.sess.Size() == 1 {
		sys, err := i.system()
		if err != nil {
			return nil, fmt.Errorf("comm: init: open the devices: %w", err)
		}
		return Local(ctx, sys.Devices(), i.cfg.Group)
	}
	// join reports a failure of devices to the other ranks, which already wait for this one.
	return join(ctx, i.sess, i.devices, i.cfg.Group)
}

// system opens the devices of this process.
func (i *initializing) system() (*device.System, error) {
	if i.cfg.Fallback == nil {
		return device.Default()
	}
	sys, note, err := device.OrVirtual()
	if err != nil || note == "" {
		return sys, err
	}
	i.virtual = sys
	if i.sess.Rank() == 0 {
		i.cfg.Fallback(note)
	}
	return sys, nil
}

// devices opens the device of this rank.
func (i *initializing) devices() ([]*device.Device, error) {
	sys, err := i.system()
	if err != nil {
		return nil, fmt.Errorf("open the devices: %w", err)
	}
	dev, err := route.OpenLocal(sys, i.sess.LocalRank(), i.sess.LocalSize())
	return []*device.Device{dev}, err
}

// Config are the options of Local and Join; nil means the defaults. They must be the same
// on all ranks.
type Config struct {
	// NCCL are the options of the ranks' communicators, including the timeout of an
	// operation (Timeout) and the size of the flight recorder. Recoverable is refused: a
	// group that fails aborts its communicators. MaxCTAs limits Chorus kernels, too: with
	// fewer thread blocks they leave more multiprocessors to kernels that run beside them.
	NCCL *nccl.Config
	// HighPriority gives the group's streams precedence over streams with the default priority
	// (is_high_priority_stream of ProcessGroupNCCL.Options). Groups of Split and Sub do as
	// their parent.
	HighPriority bool
	// Deterministic selects reductions whose bits depend on nothing but the inputs.
	// nil means that they may depend on sizes, algorithms and strategies. See Order.
	Deterministic *Order
	// Strategy selects the algorithms of the collectives.
	Strategy Strategy
	// Tuning is used by a group with the strategy Tuned. Rank 0's Tuning, or else rank 0's
	// file, applies to all ranks. nil means the file, or a measurement if the file has no
	// matching Tuning.
	Tuning *Tuning
}

func (c *Config) check(op string) error {
	if c != nil && c.NCCL != nil && c.NCCL.Recoverable {
		return badArgument(op, "NCCL.Recoverable is set, but a group that fails aborts its communicators: make them with nccl.NewCommunicator to Shrink them")
	}
	if c == nil {
		return nil
	}
	return c.Deterministic.check(op)
}

// nccl returns the options of a communicator, with onFailure called before the user's
// callback.
func (c *Config) nccl(onFailure func(*nccl.Communicator, error) error) *nccl.Config {
	n := nccl.Config{}
	if c != nil && c.NCCL != nil {
		n = *c.NCCL
	}
	if users := n.OnFailure; users != nil && onFailure != nil {
		n.OnFailure = func(x *nccl.Communicator, err error) error {
			if better := onFailure(x, err); better != nil {
				err = better
			}
			if better := users(x, err); better != nil {
				err = better
			}
			return err
		}
	} else if onFailure != nil {
		n.OnFailure = onFailure
	}
	return &n
}

// newStream creates the stream of a local rank.
func (c *Config) newStream(dev *device.Device) (*stream.Stream, error) {
	if c == nil || !c.HighPriority {
		return stream.New(dev, nil)
	}
	_, greatest, err := stream.PriorityRange(dev)
	if err != nil {
		return nil, err
	}
	return stream.New(dev, &stream.Config{Priority: greatest})
}

// Local returns a group whose ranks are all in this process: rank i on devs[i]
// (ncclCommInitAll). If devs is nil, it uses all devices of the default system; an empty list is an error. It returns
// when the communicators are ready, or with the cause when ctx ends first. The first group on a device loads NCCL's
// kernels, for which the driver may wait for all work of the device.
func Local(ctx context.Context, devs []*device.Device, cfg *Config) (*Group, error) {
	if err := cfg.check("local"); err != nil {
		return nil, err
	}
	strategy, err := cfg.strategy()
	if err != nil {
		return nil, err
	}
	if devs == nil {
		if devs, err = device.All(); err != nil {
			return nil, err
		}
	}
	if err := distinct("local", devs); err != nil {
		return nil, err
	}
	comms, err := nccl.NewCommunicators(ctx, devs, cfg.nccl(nil))
	if err != nil {
		return nil, fmt.Errorf("comm: local: %w", err)
	}
	g, err := newGroup(comms, cfg)
	if err != nil {
		return nil, err
	}
	err = g.openRouters(ctx, strategy, nil, fabric.NewTable(len(devs)).Seat)
	if err == nil {
		err = g.setInitialTuning(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// distinct returns an error unless devs are different devices of one system.
func distinct(op string, devs []*device.Device) error {
	if len(devs) == 0 {
		return badArgument(op, "no devices given: want one for each local rank")
	}
	for i, d := range devs {
		if d == nil {
			return badArgument(op, "device %d of %d is nil", i, len(devs))
		}
		for j := range i {
			if devs[j] == d {
				return badArgument(op, "local ranks %d and %d are both on %s: NCCL refuses several communicators of a process on one device; for tests, %s=yes permits one process for each rank", j, i, d, env.ShareGPUs.Name)
			}
			if devs[j].System() != d.System() {
				return badArgument(op, "local ranks %d and %d are on devices of two systems", j, i)
			}
		}
	}
	return nil
}

// encrypts reports whether the environment asks for encryption.
func encrypts() bool { return env.NCCLEncrypt.Value() == "yes" }

// encrypt has NCCL encrypt its connections if the environment asks for it, with a key that the
// processes of the job derive from its secret.
func encrypt(r Rendezvous, dev *device.Device) error {
	if _, err := env.NCCLEncrypt.OneOf("yes", "no"); err != nil || !encrypts() {
		return err
	}
	keys, ok := r.(interface {
		Key(purpose string) ([]byte, error)
	})
	if !ok {
		return fmt.Errorf("%s is yes, but a %T has no key: call nccl.SetEncryption, and unset %[1]s", env.NCCLEncrypt.Name, r)
	}
	key, err := keys.Key("nccl")
	if err != nil {
		return fmt.Errorf("%s is yes: %w", env.NCCLEncrypt.Name, err)
	}
	return nccl.SetEncryption(dev, []byte(hex.EncodeToString(key)))
}

// ErrBroken is matched by the errors of all calls on a group after one of its ranks failed
// or was lost. The errors also wrap the first cause.
var ErrBroken = errors.New("the group is broken")

// ErrLeft is matched by the errors of a broken group if another process has closed it while it was intact. That process has left
// and has not failed: the others can form another group at once.
var ErrLeft = errors.New("a rank has left the group")

// ErrMismatch is matched by the errors of invalid arguments, for example if the number of
// slices, their lengths or their devices do not fit the group, or a rank does not exist.
// Operations that cannot be combined, such as two in a Batch that write the same memory, match
// nccl.ErrorInvalidUsage instead, and closed memory may match device.ErrClosed only.
var ErrMismatch = errors.New("the arguments do not fit the group")

// An argumentError makes an error match ErrMismatch without changing its text.
type argumentError struct{ err error }

func (e *argumentError) Error() string { return e.err.Error() }

// Unwrap returns ErrMismatch and the cause, for errors.Is.
func (e *argumentError) Unwrap() []error { return []error{ErrMismatch, e.err} }

// brokenError wraps ErrBroken and the cause.
type brokenError struct{ cause error }

func (e *brokenError) Error() string { return fmt.Sprintf("comm: %v: %v", ErrBroken, e.cause) }

func (e *brokenError) Unwrap() []error { return []error{ErrBroken, e.cause} }

// NoColor is the color of a rank that does not join any group of Split.
const NoColor = -1

// Split divides the group into one group for each color (ncclCommSplit). colors has an entry for each local
// rank: a color from 0 on, or NoColor. In a new group the ranks are ordered by their keys,
// then as in g; nil keys are all equal. Colors and keys have 32 bits. Split returns the
// group of each local rank, by local rank: the same group for ranks of the same color, nil
// for NoColor.
//
// It returns when all ranks have called it, or with the cause when ctx ends first. The
// groups have their own streams and stay usable when g is closed. They are broken when one
// of their ranks, or a process of g's Rendezvous, is lost. Operations on groups that share
// a device must be issued in the same order on all ranks. Collective.
func (g *Group) Split(ctx context.Context, colors, keys []int) ([]*Group, error) {
	const op = "split"
	if err := g.check(op); err != nil {
		return nil, err
	}
	if err := g.refuseCapture(op); err != nil {
		return nil, err
	}
	keys, err := g.checkColors(op, colors, keys)
	if err != nil {
		return nil, err
	}
	if len(g.members) < g.size {
		if err := g.checkSame(ctx, op, "a call of Split", sameCalls); err != nil {
			return nil, err
		}
	}
	return g.split(ctx, op, colors, keys)
}

// refuseCapture returns an error if one of the group's streams is being captured.
func (g *Group) refuseCapture(op string) error {
	for i := range g.members {
		if err := gpu.StreamOf(g.members[i].stream).RefuseCapture("comm: "+op, "split the group before the capture"); err != nil {
			return err
		}
	}
	return nil
}

// sameCalls is the cure if ranks make groups by different functions.
const sameCalls = "call the same function with the same ranks on all ranks"

// split is Split after the checks.
func (g *Group) split(ctx context.Context, op string, colors, keys []int) ([]*Group, error) {
	g.splits++
	watchers := map[int]*reporter{} // by color
	comms := make([]*nccl.Communicator, len(colors))
	eg, all := errgroup.WithContext(ctx)
	for i := range g.members {
		w := watchers[colors[i]]
		if g.reporter != nil && w == nil {
			w = g.reporter.child(fmt.Sprintf("split/%d/%d/", g.splits, colors[i]))
			watchers[colors[i]] = w
		}
		eg.Go(func() (err error) {
			comms[i], err = g.members[i].comm.Split(all, colors[i], keys[i], g.childConfig(w))
			return err
		})
	}
	if err := eg.Wait(); err != nil {
		for _, c := range comms {
			_ = c.Close() // the earlier error is returned
		}
		return nil, g.breakIfRefused(fmt.Errorf("comm: %s: %w", op, err))
	}
	return g.children(ctx, colors, comms, watchers)
}

// checkColors validates the arguments of Split, and returns the keys.
func (g *Group) checkColors(op string, colors, keys []int) ([]int, error) {
	if len(colors) != len(g.members) || keys != nil && len(keys) != len(g.members) {
		return nil, fmt.Errorf("comm: %s: %d colors and %d keys for %d local ranks: %w", op, len(colors), len(keys), len(g.members), ErrMismatch)
	}
	if keys == nil {
		keys = make([]int, len(colors))
	}
	for i, color := range colors {
		if color < NoColor || color > math.MaxInt32 || keys[i] < math.MinInt32 || keys[i] > math.MaxInt32 {
			return nil, badArgument(op, "color %d and key %d of local rank %d: want NoColor or a color from 0 to %d, and a key of 32 bits", color, keys[i], i, math.MaxInt32)
		}
	}
	return keys, nil
}

// childConfig leaves the name empty, because package nccl gives each child a different
// name.
func (g *Group) childConfig(w *reporter) *nccl.Config {
	n := g.cfg.nccl(w.onFailure())
	n.Name = ""
	return n
}

// children returns the groups of communicators.
func (g *Group) children(ctx context.Context, colors []int, comms []*nccl.Communicator, watchers map[int]*reporter) ([]*Group, error) {
	groups := make([]*Group, len(colors))
	for i, c := range comms {
		if c == nil || groups[i] != nil {
			continue
		}
		var mine []*nccl.Communicator
		var at []int
		for j := i; j < len(comms); j++ {
			if colors[j] == colors[i] {
				at = append(at, j)
			}
		}
		slices.SortFunc(at, func(a, b int) int { return comms[a].Rank() - comms[b].Rank() })
		var parents []int // ranks in g
		for _, j := range at {
			mine, parents = append(mine, comms[j]), append(parents, g.members[j].comm.Rank())
		}
		child, err := newGroup(mine, g.cfg)
		if err == nil {
			err = child.openRouters(ctx, route.NCCLOnly, nil, nil)
		}
		if err == nil && g.reporter != nil {
			err = child.watchChild(ctx, watchers[colors[i]], parents)
		}
		if err != nil {
			_ = child.Close()
			for j, made := range groups {
				if _ = made.Close(); made == nil && comms[j] != nil {
					_ = comms[j].Close()
				}
			}
			return nil, err
		}
		for _, j := range at {
			groups[j] = child
		}
	}
	return groups, nil
}

// Sub returns a group of some ranks, which get the new ranks 0, 1, 2... as they
// stand in the list (torch.distributed.new_group). All ranks of g must call it
// with the same list, or all get an error. It returns nil if none of the ranks
// is local, and otherwise behaves like Split. Collective.
func (g *Group) Sub(ctx context.Context, ranks ...int) (*Group, error) {
	const op = "sub-group"
	if err := g.checkSame(ctx, op, fmt.Sprint("a call of Sub with the ranks ", ranks), sameCalls); err != nil {
		return nil, err
	}
	for i, r := range ranks {
		if r < 0 || r >= g.size || slices.Contains(ranks[:i], r) {
			return nil, fmt.Errorf("comm: %s: rank %d does not exist or is given twice: want different ranks below %d: %w", op, r, g.size, ErrMismatch)
		}
	}
	colors, keys := make([]int, len(g.members)), make([]int, len(g.members))
	for i := range g.members {
		keys[i] = slices.Index(ranks, g.members[i].comm.Rank())
		if colors[i] = 0; keys[i] < 0 {
			colors[i], keys[i] = NoColor, 0
		}
	}
	if err := g.refuseCapture(op); err != nil {
		return nil, err
	}
	groups, err := g.split(ctx, op, colors, keys)
	if err != nil {
		return nil, err
	}
	for _, sub := range groups {
		if sub != nil {
			return sub, nil
		}
	}
	return nil, nil
}
