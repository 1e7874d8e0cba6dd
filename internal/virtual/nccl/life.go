package nccl

import (
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// Functions of NCCL after 2.28.3. A library of an older version does not have them.

// meet waits at rank 0 for all ranks, and returns the note of one rank.
func (c *comm) meet(f ncclapi.Func, meeting, note string) (string, ncclapi.Result) {
	j := &joiner{Meeting: meeting, Ranks: c.n, Rank: c.rank, Key: c.rank, Member: c.members[c.rank], Note: note}
	v, err := join(c.members[0].Address, c.token, j)
	switch {
	case err != nil:
		return "", c.lib.refuse(ncclapi.RemoteError, "%s at rank %d: the connection to rank 0 was lost before all %d ranks had joined: %v", f.Name(), c.rank, c.n, err)
	case v.Result != ncclapi.Success:
		return "", c.lib.refuse(v.Result, "%s: %s", f.Name(), v.Text)
	}
	return v.Note, ncclapi.Success
}

// CommRevoke stops operations in progress, after which the communicator can
// only be used to create others.
func (l *lib) CommRevoke(h ncclapi.Comm, flags int32) ncclapi.Result {
	const f = ncclapi.FuncCommRevoke
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if flags != ncclapi.RevokeDefault || c.revoked {
		return l.refuse(ncclapi.InvalidArgument, "%s: flags %d are invalid, or the communicator of rank %d is already revoked", f.Name(), flags, c.rank)
	}
	c.revoked = true
	c.halt()
	return ncclapi.Success
}

func (c *comm) isRevoked() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.revoked
}

// CommGetUniqueID opens the meeting for new ranks.
func (l *lib) CommGetUniqueID(h ncclapi.Comm) (ncclapi.UniqueID, ncclapi.Result) {
	const f = ncclapi.FuncCommGetUniqueID
	if r := l.enter(f); r != ncclapi.Success {
		return ncclapi.UniqueID{}, r
	}
	if _, r := l.comm(f, h); r != ncclapi.Success {
		return ncclapi.UniqueID{}, r
	}
	id, err := l.startRoot()
	if err != nil {
		return id, l.refuse(ncclapi.SystemError, "%s: %v", f.Name(), err)
	}
	return id, ncclapi.Success
}

// CommGrow creates a communicator with the ranks of an old one, which keep their
// numbers, and new ranks. One of the old ranks passes the id; new ranks have no
// communicator.
func (l *lib) CommGrow(h ncclapi.Comm, nranks int32, id *ncclapi.UniqueID, rank int32, out *ncclapi.Comm, cfg *ncclapi.Config) ncclapi.Result {
	const f = ncclapi.FuncCommGrow
	if !l.Has(f) {
		return ncclapi.MissingSymbol
	}
	if h == 0 {
		if id == nil {
			return l.refuse(ncclapi.InvalidArgument, "%s: a new rank needs the id", f.Name())
		}
		return l.initRank(f, out, nranks, rank, id, cfg)
	}
	c, r := l.parent(f, h, out, cfg)
	if r != ncclapi.Success {
		return l.failGroup(r)
	}
	if rank != -1 || int(nranks) <= c.n {
		return l.failGroup(l.refuse(ncclapi.InvalidArgument, "%s at rank %d: from %d ranks to %d, as rank %d: want more ranks, and -1", f.Name(), c.rank, c.n, nranks, rank))
	}
	meeting, note := fmt.Sprintf("grow %d", c.nextChild()), ""
	if id != nil {
		note = hex.EncodeToString(id[:])
	}
	name := nameOf(cfg)
	return l.later(func() ncclapi.Result {
		note, r := c.meet(f, meeting, note)
		if r != ncclapi.Success {
			return r
		}
		var met ncclapi.UniqueID
		if n, err := hex.Decode(met[:], []byte(note)); n != len(met) || err != nil {
			return l.refuse(ncclapi.InvalidArgument, "%s: no rank has passed the id", f.Name())
		}
		t, address, err := parseID(&met)
		if err != nil {
			return l.refuse(ncclapi.InvalidArgument, "%s: %v", f.Name(), err)
		}
		j := &joiner{Ranks: int(nranks), Rank: c.rank, Key: c.rank}
		return l.make(f, out, c.dev, t, address, t, j, name)
	})
}

func (l *lib) CommSuspend(h ncclapi.Comm, flags int32) ncclapi.Result {
	return l.suspend(ncclapi.FuncCommSuspend, h, flags == ncclapi.SuspendMem, true)
}

func (l *lib) CommResume(h ncclapi.Comm) ncclapi.Result {
	return l.suspend(ncclapi.FuncCommResume, h, true, false)
}

// suspend sets whether the communicator is suspended, if it is idle.
func (l *lib) suspend(f ncclapi.Func, h ncclapi.Comm, flags, to bool) ncclapi.Result {
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !flags:
		return l.refuse(ncclapi.InvalidArgument, "%s: the flags are invalid", f.Name())
	case c.suspended == to:
		return l.refuse(ncclapi.InvalidUsage, "%s: the communicator of rank %d is already in that state", f.Name(), c.rank)
	case c.running > 0:
		return l.refuse(ncclapi.InvalidUsage, "%s: operations of rank %d have not completed", f.Name(), c.rank)
	}
	c.suspended = to
	return ncclapi.Success
}

// virtualCommMemory is the reported memory of a communicator for each rank.
const virtualCommMemory = 1 << 20

func (l *lib) CommMemStats(h ncclapi.Comm, stat int32) (uint64, ncclapi.Result) {
	const f = ncclapi.FuncCommMemStats
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return 0, r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch stat {
	case ncclapi.StatGPUMemSuspend:
		return uint64(c.n) * virtualCommMemory, ncclapi.Success
	case ncclapi.StatGPUMemSuspended:
		if c.suspended {
			return 1, ncclapi.Success
		}
		return 0, ncclapi.Success
	case ncclapi.StatGPUMemPersist:
		return virtualCommMemory, ncclapi.Success
	case ncclapi.StatGPUMemTotal:
		return uint64(c.n+1) * virtualCommMemory, ncclapi.Success
	}
	return 0, l.refuse(ncclapi.InvalidArgument, "%s: statistic %d does not exist", f.Name(), stat)
}

// CommQueryProperties reports, among others, that ranks of several processes do not support
// one-sided operations.
func (l *lib) CommQueryProperties(h ncclapi.Comm, p *ncclapi.Properties) ncclapi.Result {
	const f = ncclapi.FuncCommQueryProperties
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return r
	}
	if p == nil || p.Magic != ncclapi.ConfigMagic || p.Size != ncclapi.NewProperties(l.cfg.Version).Size {
		return l.refuse(ncclapi.InvalidArgument, "%s: the properties are not initialised", f.Name())
	}
	p.Rank, p.NRanks, p.CUDADev, p.NVMLDev, p.NLSATeams = int32(c.rank), int32(c.n), c.dev.Ordinal(), c.dev.Ordinal(), int32(c.n/c.lsaSize())
	if c.lsaSize() == c.n {
		p.HostRMASupport = 1
	}
	return ncclapi.Success
}

// paramKeys lists the known parameters. They have no effect.
var paramKeys = []string{"NCCL_ALGO", "NCCL_DEBUG", "NCCL_PROTO"}

// ParamGetParameter returns the value from the environment.
func (l *lib) ParamGetParameter(key string) (string, ncclapi.Result) {
	const f = ncclapi.FuncParamGetParameter
	if r := l.enter(f); r != ncclapi.Success {
		return "", r
	}
	if !slices.Contains(paramKeys, key) {
		return "", l.refuse(ncclapi.InvalidArgument, "%s: parameter %q does not exist", f.Name(), key)
	}
	return os.Getenv(key), ncclapi.Success
}

// ParamBind returns the place of a parameter in paramKeys, from 1.
func (l *lib) ParamBind(key string) (ncclapi.Param, ncclapi.Result) {
	const f = ncclapi.FuncParamBind
	if r := l.enter(f); r != ncclapi.Success {
		return 0, r
	}
	i := slices.Index(paramKeys, key)
	if i < 0 {
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: parameter %q does not exist", f.Name(), key)
	}
	return ncclapi.Param(i + 1), ncclapi.Success
}

// ParamGetI64 returns the number in the environment; an unset parameter is 0.
func (l *lib) ParamGetI64(p ncclapi.Param) (int64, ncclapi.Result) {
	const f = ncclapi.FuncParamGetI64
	if r := l.enter(f); r != ncclapi.Success {
		return 0, r
	}
	if p < 1 || int(p) > len(paramKeys) {
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: the parameter is not bound", f.Name())
	}
	key := paramKeys[p-1]
	text := os.Getenv(key)
	if text == "" {
		return 0, ncclapi.Success
	}
	v, err := strconv.ParseInt(text, 0, 64)
	if err != nil {
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: the value %q of %s is not a number", f.Name(), text, key)
	}
	return v, ncclapi.Success
}

// ParamDumpAll writes the parameters to the log.
func (l *lib) ParamDumpAll() ncclapi.Result {
	if r := l.enter(ncclapi.FuncParamDumpAll); r != ncclapi.Success {
		return r
	}
	for _, key := range paramKeys {
		slog.Info("NCCL parameter", "key", key, "value", os.Getenv(key))
	}
	return ncclapi.Success
}

// DevCommCreate refuses: virtual devices run Go functions, for which NCCL has no device API.
func (l *lib) DevCommCreate(h ncclapi.Comm, reqs *ncclapi.DevCommRequirements, out *ncclapi.DevComm) ncclapi.Result {
	const f = ncclapi.FuncDevCommCreate
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return r
	}
	if out == nil || reqs == nil || reqs.Magic != ncclapi.ConfigMagic || reqs.Size != ncclapi.NewDevCommRequirements(l.cfg.Version).Size {
		return l.refuse(ncclapi.InvalidArgument, "%s: the requirements are not initialised", f.Name())
	}
	return l.refuse(ncclapi.InvalidUsage, "%s at rank %d: virtual devices run Go functions in place of CUDA kernels, and NCCL's device API has none", f.Name(), c.rank)
}

// DevCommDestroy refuses, because there is no device communicator.
func (l *lib) DevCommDestroy(h ncclapi.Comm, _ *ncclapi.DevComm) ncclapi.Result {
	const f = ncclapi.FuncDevCommDestroy
	if _, r := l.begin(f, h); r != ncclapi.Success {
		return r
	}
	return l.refuse(ncclapi.InvalidArgument, "%s: the device communicator does not exist", f.Name())
}

func (l *lib) ParamGetAllParameterKeys() ([]string, ncclapi.Result) {
	if r := l.enter(ncclapi.FuncParamGetAllParameterKeys); r != ncclapi.Success {
		return nil, r
	}
	return append([]string(nil), paramKeys...), ncclapi.Success
}
