package ncclapi

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// minVersion is the oldest NCCL that Chorus runs on. Every function that it
// had is required.
const (
	minVersion     = 22304
	minVersionText = "2.23"
)

var spec = &dl.Spec{
	Name:    "NCCL",
	Env:     env.LibNCCL,
	Sonames: []string{"libnccl.so.2"},
	Folders: dl.Toolkit,
	Wheels:  []string{"nccl/lib"},
}

// Lib is the loaded libnccl.so.2. It implements API.
type Lib struct {
	dl.Table[Func, Result]
	version int32
}

// Open loads NCCL, once per process. The error is a *dl.Error when there is
// none and a *dl.VersionError when it is too old; both match
// errors.ErrUnsupported.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	if err := setHostID(); err != nil {
		return nil, err
	}
	t, missing := dl.NewTable[Func](find, path, dl.Since(symbols[:], minVersion), MissingSymbol)
	l := &Lib{Table: t}
	l.version, _ = l.GetVersion() // 0, so too old, if it fails
	if l.version < minVersion || len(missing) > 0 {
		return nil, &dl.VersionError{Library: "NCCL", Path: path, Loaded: VersionText(l.version), Needed: minVersionText, Missing: missing}
	}
	return l, nil
}

// Version returns the version code of the loaded library.
func (l *Lib) Version() int32 { return l.version }

// ParseVersion reads what VersionText writes, of a version that Chorus runs on.
func ParseVersion(text string) (int32, error) {
	var major, minor, patch int32
	if _, err := fmt.Sscanf(text, "%d.%d.%d", &major, &minor, &patch); err != nil {
		return 0, errors.New("a version such as 2.28.3")
	}
	code := major*10000 + minor*100 + patch
	if code < minVersion {
		return 0, errors.New("a version from " + VersionText(minVersion))
	}
	return code, nil
}

// VersionText writes a version code: 22803 is "2.28.3".
func VersionText(code int32) string {
	if code < 10000 { // the scheme of 2.8 and before
		return fmt.Sprintf("%d.%d.%d", code/1000, code%1000/100, code%100)
	}
	return fmt.Sprintf("%d.%d.%d", code/10000, code%10000/100, code%100)
}

var _ API = (*Lib)(nil)

// The methods of Lib have no comments: each is the C function of
// its name.

func (l *Lib) GetVersion() (int32, Result) {
	v, r := l.Call1(FuncGetVersion, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) GetUniqueID() (UniqueID, Result) {
	id := new(UniqueID)
	r := l.Call(FuncGetUniqueID, dl.Get().Ptr(unsafe.Pointer(id)))
	return *id, r
}

func (l *Lib) GetLastError(c Comm) string {
	return l.Text(FuncGetLastError, dl.Get().In(uintptr(c)))
}

func (l *Lib) CommInitRankScalable(out *Comm, nranks, rank int32, ids []UniqueID, cfg *Config) Result {
	return l.Call(FuncCommInitRankScalable, dl.Get().
		Ptr(unsafe.Pointer(out)).In(uintptr(nranks), uintptr(rank), uintptr(len(ids))).
		Ptr(unsafe.Pointer(unsafe.SliceData(ids))).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) CommSplit(c Comm, color, key int32, out *Comm, cfg *Config) Result {
	return l.Call(FuncCommSplit, dl.Get().
		In(uintptr(c), uintptr(color), uintptr(key)).Ptr(unsafe.Pointer(out)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) CommShrink(c Comm, exclude []int32, out *Comm, cfg *Config, flags int32) Result {
	return l.Call(FuncCommShrink, dl.Get().
		In(uintptr(c)).Ptr(unsafe.Pointer(unsafe.SliceData(exclude))).In(uintptr(len(exclude))).
		Ptr(unsafe.Pointer(out)).Ptr(unsafe.Pointer(cfg)).In(uintptr(flags)))
}

func (l *Lib) CommFinalize(c Comm) Result { return l.Call(FuncCommFinalize, dl.Get().In(uintptr(c))) }

func (l *Lib) CommDestroy(c Comm) Result { return l.Call(FuncCommDestroy, dl.Get().In(uintptr(c))) }

func (l *Lib) CommAbort(c Comm) Result { return l.Call(FuncCommAbort, dl.Get().In(uintptr(c))) }

func (l *Lib) CommGetAsyncError(c Comm) (async Result, r Result) {
	v, r := l.Call1(FuncCommGetAsyncError, dl.Get().In(uintptr(c)).Out())
	return Result(v), r
}

func (l *Lib) CommCount(c Comm) (int32, Result) {
	v, r := l.Call1(FuncCommCount, dl.Get().In(uintptr(c)).Out())
	return int32(v), r
}

func (l *Lib) CommUserRank(c Comm) (int32, Result) {
	v, r := l.Call1(FuncCommUserRank, dl.Get().In(uintptr(c)).Out())
	return int32(v), r
}

func (l *Lib) CommCuDevice(c Comm) (int32, Result) {
	v, r := l.Call1(FuncCommCuDevice, dl.Get().In(uintptr(c)).Out())
	return int32(v), r
}

func (l *Lib) CommRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr) (RegID, Result) {
	h, r := l.Call1(FuncCommRegister, dl.Get().In(uintptr(c), uintptr(p), bytes).Out())
	return RegID(h), r
}

func (l *Lib) CommDeregister(c Comm, h RegID) Result {
	return l.Call(FuncCommDeregister, dl.Get().In(uintptr(c), uintptr(h)))
}

func (l *Lib) CommWindowRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr, out *Window, flags int32) Result {
	return l.Call(FuncCommWindowRegister, dl.Get().
		In(uintptr(c), uintptr(p), bytes).Ptr(unsafe.Pointer(out)).In(uintptr(flags)))
}

func (l *Lib) CommWindowDeregister(c Comm, w Window) Result {
	return l.Call(FuncCommWindowDeregister, dl.Get().In(uintptr(c), uintptr(w)))
}

func (l *Lib) CommRevoke(c Comm, flags int32) Result {
	return l.Call(FuncCommRevoke, dl.Get().In(uintptr(c), uintptr(flags)))
}

func (l *Lib) CommGetUniqueID(c Comm) (UniqueID, Result) {
	id := new(UniqueID)
	r := l.Call(FuncCommGetUniqueID, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(id)))
	return *id, r
}

func (l *Lib) CommGrow(c Comm, nranks int32, id *UniqueID, rank int32, out *Comm, cfg *Config) Result {
	return l.Call(FuncCommGrow, dl.Get().
		In(uintptr(c), uintptr(nranks)).Ptr(unsafe.Pointer(id)).In(uintptr(rank)).
		Ptr(unsafe.Pointer(out)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) CommSuspend(c Comm, flags int32) Result {
	return l.Call(FuncCommSuspend, dl.Get().In(uintptr(c), uintptr(flags)))
}

func (l *Lib) CommResume(c Comm) Result { return l.Call(FuncCommResume, dl.Get().In(uintptr(c))) }

func (l *Lib) CommMemStats(c Comm, stat int32) (uint64, Result) {
	return l.Call1(FuncCommMemStats, dl.Get().In(uintptr(c), uintptr(stat)).Out())
}

func (l *Lib) CommQueryProperties(c Comm, p *Properties) Result {
	return l.Call(FuncCommQueryProperties, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(p)))
}

func (l *Lib) DevCommCreate(c Comm, reqs *DevCommRequirements, out *DevComm) Result {
	return l.Call(FuncDevCommCreate, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(reqs)).Ptr(unsafe.Pointer(out)))
}

func (l *Lib) DevCommDestroy(c Comm, d *DevComm) Result {
	return l.Call(FuncDevCommDestroy, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(d)))
}

func (l *Lib) WinGetUserPtr(c Comm, w Window) (cudadrv.DevicePtr, Result) {
	p, r := l.Call1(FuncWinGetUserPtr, dl.Get().In(uintptr(c), uintptr(w)).Out())
	return cudadrv.DevicePtr(p), r
}

// words are the arguments of a call for each operation.
type words = [dl.DirectWords]uintptr

func (l *Lib) MemAlloc(bytes uintptr) (cudadrv.DevicePtr, Result) {
	p, r := l.Call1(FuncMemAlloc, dl.Get().Out().In(bytes))
	return cudadrv.DevicePtr(p), r
}

func (l *Lib) MemFree(p cudadrv.DevicePtr) Result {
	return l.Call(FuncMemFree, dl.Get().In(uintptr(p)))
}

func (l *Lib) RedOpCreatePreMulSum(scalar unsafe.Pointer, t DType, residence int32, c Comm) (RedOp, Result) {
	op, r := l.Call1(FuncRedOpCreatePreMulSum, dl.Get().Out().Ptr(scalar).In(uintptr(t), uintptr(residence), uintptr(c)))
	return RedOp(op), r
}

func (l *Lib) RedOpDestroy(op RedOp, c Comm) Result {
	return l.Call(FuncRedOpDestroy, dl.Get().In(uintptr(op), uintptr(c)))
}

// A shape has the number of arguments of each kind, 0 or 1, that not all functions of Collectives have.
type shape struct{ send, recv, op, root uint8 }

var shapes = func() (shapes [NumFuncs]shape) {
	for f := range Collectives {
		n := func(argument string) uint8 { return uint8(strings.Count(Collectives[f].Arguments, argument)) }
		shapes[f] = shape{send: n("s"), recv: n("r"), op: n("o"), root: n("p")}
	}
	return shapes
}()

// arguments returns the arguments that C gets, and their number. All functions have them in one order, but
// not all have the same. An argument that the function lacks is overwritten by the next one.
func (c *Call) arguments() (w words, n uint8) {
	s := shapes[c.Func]
	w[0] = uintptr(c.Send)
	n = s.send
	w[n%dl.DirectWords] = uintptr(c.Recv)
	n += s.recv
	w[n%dl.DirectWords], w[(n+1)%dl.DirectWords] = c.Count, uintptr(c.Type)
	n += 2
	w[n%dl.DirectWords] = uintptr(c.Op)
	n += s.op
	w[n%dl.DirectWords] = uintptr(c.Root)
	n += s.root
	w[n%dl.DirectWords], w[(n+1)%dl.DirectWords] = uintptr(c.Comm), uintptr(c.Stream)
	return w, n + 2
}

func (l *Lib) Collective(c Call) Result {
	w, n := c.arguments()
	if c.Config == nil {
		return l.Direct(c.Func, &w)
	}
	// A call that passes a struct uses a frame, which keeps the struct alive and in its place.
	return l.Call(c.Called(), dl.Get().In(w[:n]...).Ptr(unsafe.Pointer(c.Config)))
}

func (l *Lib) GroupStart() Result { return l.Direct(FuncGroupStart, &words{}) }

func (l *Lib) GroupEnd() Result { return l.Direct(FuncGroupEnd, &words{}) }

func (l *Lib) GroupSimulateEnd(info *SimInfo) Result {
	return l.Call(FuncGroupSimulateEnd, dl.Get().Ptr(unsafe.Pointer(info)))
}

func (l *Lib) PutSignal(local cudadrv.DevicePtr, count uintptr, t DType, peer int32, w Window, offset uintptr, signal, ctx int32, flags uint32, c Comm, s cudadrv.Stream) Result {
	return l.Call(FuncPutSignal, dl.Get().
		In(uintptr(local), count, uintptr(t), uintptr(peer), uintptr(w), offset, uintptr(signal), uintptr(ctx), uintptr(flags), uintptr(c), uintptr(s)))
}

func (l *Lib) Signal(peer, signal, ctx int32, flags uint32, c Comm, s cudadrv.Stream) Result {
	return l.Call(FuncSignal, dl.Get().
		In(uintptr(peer), uintptr(signal), uintptr(ctx), uintptr(flags), uintptr(c), uintptr(s)))
}

func (l *Lib) WaitSignal(descs []SignalDesc, c Comm, s cudadrv.Stream) Result {
	return l.Call(FuncWaitSignal, dl.Get().
		In(uintptr(len(descs))).Ptr(unsafe.Pointer(unsafe.SliceData(descs))).In(uintptr(c), uintptr(s)))
}

func (l *Lib) SetEncryption(cfg *EncryptionConfig) Result {
	return l.Call(FuncSetEncryption, dl.Get().Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) GetPeerDevicePointer(w Window, offset uintptr, peer int32) (cudadrv.DevicePtr, Result) {
	p, r := l.Call1(FuncGetPeerDevicePointer, dl.Get().In(uintptr(w), offset, uintptr(peer)).Out())
	return cudadrv.DevicePtr(p), r
}

// ParamGetParameter returns parameters of every type as text, and ParamGetI64 every number. The
// getters of narrower types, of text and of bytes return the same values, so they are not bound.
//
// NCCL owns the strings that it returns for parameters, until the next such call of the
// thread.

func (l *Lib) ParamGetParameter(key string) (string, Result) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	text, n, r := l.Call2(FuncParamGetParameter, dl.Get().String(key).Out().Out())
	if r != Success || text == 0 {
		return "", r
	}
	return string(unsafe.Slice((*byte)(dl.Pointer(text)), int(int32(n)))), r
}

func (l *Lib) ParamGetAllParameterKeys() ([]string, Result) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	table, n, r := l.Call2(FuncParamGetAllParameterKeys, dl.Get().Out().Out())
	if r != Success || table == 0 {
		return nil, r
	}
	var keys []string
	for _, text := range unsafe.Slice((*uintptr)(dl.Pointer(table)), int(int32(n))) {
		keys = append(keys, dl.GoString(text))
	}
	return keys, r
}

func (l *Lib) ParamBind(key string) (Param, Result) {
	p, r := l.Call1(FuncParamBind, dl.Get().Out().String(key))
	return Param(p), r
}

func (l *Lib) ParamGetI64(p Param) (int64, Result) {
	v, r := l.Call1(FuncParamGetI64, dl.Get().In(uintptr(p)).Out())
	return int64(v), r
}

func (l *Lib) ParamDumpAll() Result {
	if r := l.Call(FuncParamDumpAll, dl.Get()); r == MissingSymbol {
		return r
	}
	return Success // the function of C has no result
}
