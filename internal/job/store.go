package job

import (
	"bytes"
	"maps"
	"math"
	"slices"
	"strconv"
	"sync/atomic"
)

// Limits of the store.
const (
	MaxKeyBytes   = 1 << 10  // one key, or the name of a barrier
	MaxValueBytes = 1 << 20  // one value
	MaxStoreBytes = 64 << 20 // all keys, values and waiting calls together

	// MaxCallBytes is the maximum for all keys and values of a call or of its reply.
	MaxCallBytes = 2*MaxValueBytes + MaxKeyBytes + 1024
	fieldBytes   = 4 // the length of a key or value in a message

	// entryBytes is the approximate overhead of a key.
	entryBytes = 192
	// MaxCallKeys limits the keys of a call: each costs the coordinator more time than its bytes suggest.
	MaxCallKeys = MaxWaitKeys
)

// Operations of a call.
const (
	OpSet     byte = iota + 1 // fields: key, value
	OpGet                     // key; waits
	OpWait                    // keys; waits
	OpAdd                     // n, key
	OpSwap                    // key, old, new; a nil old means absent, a nil new delete
	OpDelete                  // key
	OpBarrier                 // name; waits
	OpFinish                  // none; waits: the barrier of Shutdown
	OpGetAll                  // keys; waits
	OpSetAll                  // key, value, key, value, …
	OpAppend                  // key, value
	OpHas                     // keys
	OpCount                   // none
)

// Statuses of a reply.
const (
	StatusOK        byte = iota
	StatusTooLarge       // a limit of one key or value
	StatusFull           // MaxStoreBytes
	StatusNotNumber      // Add
	StatusBusy           // Barrier
	StatusAbsent         // Barrier: cancelled; fields are the missing ranks
	StatusLeft           // Barrier: fields are the ranks that left
	statusBad            // invalid call
	StatusTooMany        // maxWaits or maxWaitKeys
	StatusStale          // the call belongs to another epoch
	StatusNoKey          // a key is empty
)

// An engine implements the store and its barriers as a state machine without
// locks or goroutines; its owner calls it under a lock. Reply functions must not
// block.
type engine struct {
	size     int // world size
	values   map[string]value
	bytes    int           // of keys, short values and waiting calls
	held     *atomic.Int64 // bytes of long values, also of those that only queued replies still have
	waiting  map[ticket]*waiter
	byKey    map[string]map[*waiter]bool
	loads    map[int]load // by rank
	barriers map[string]*barrier
	left     map[int]bool
}

// A value of a key. Its bytes are never overwritten, because queued replies share a long value with the store.
type value struct {
	b   []byte
	buf *buffer // nil if the value is shorter than shareFrom
}

// A buffer is the memory of a long value. It is charged to the store until neither the store nor a queued reply has it.
type buffer struct {
	size int64
	refs atomic.Int32
	held *atomic.Int64
}

func (b *buffer) retain() *buffer { b.refs.Add(1); return b }

func (b *buffer) release() {
	if b.refs.Add(-1) == 0 {
		b.held.Add(-b.size)
	}
}

// newValue returns a value with a copy of b and more in memory for room bytes.
func (e *engine) newValue(b, more []byte, room int) value {
	v := value{b: append(append(make([]byte, 0, room), b...), more...)}
	if room >= shareFrom {
		v.buf = &buffer{size: int64(room), held: e.held}
		v.buf.refs.Store(1)
		e.held.Add(v.buf.size)
	}
	return v
}

// freed returns how many bytes the store shrinks if v is removed.
func (v value) freed() int {
	switch {
	case v.buf == nil:
		return len(v.b)
	case v.buf.refs.Load() == 1:
		return int(v.buf.size)
	}
	return 0 // a queued reply has it
}

// total returns what the store is charged with.
func (e *engine) total() int { return e.bytes + int(e.held.Load()) }

// close releases all values, except those that queued replies still use.
func (e *engine) close() {
	if e == nil {
		return
	}
	for _, v := range e.values {
		if v.buf != nil {
			v.buf.release()
		}
	}
	clear(e.values)
}

// A ticket identifies a call of a rank.
type ticket struct {
	rank int
	id   uint64
}

type waiter struct {
	ticket
	op      byte
	keys    []string // without duplicates
	absent  int      // number of keys without a value
	barrier string   // its name, of opBarrier and opFinish
	bytes   int      // charged to the store
	reply   func(Call)
}

type barrier struct{ come map[int]*waiter }

// finishBarrier differs from the name of every user's barrier, because those have
// a prefix.
const finishBarrier = ""

// newEngine returns an empty store for a world of size processes, whose long values are charged to held.
func newEngine(size int, held *atomic.Int64) *engine {
	return &engine{
		size: size, held: held, values: map[string]value{}, waiting: map[ticket]*waiter{},
		byKey: map[string]map[*waiter]bool{}, loads: map[int]load{}, barriers: map[string]*barrier{}, left: map[int]bool{},
	}
}

// do runs one call, and replies immediately, or later if the call waits.
func (e *engine) do(t ticket, c Call, reply func(Call)) {
	if status := CheckCall(c); status != StatusOK {
		reply(Call{Op: status})
		return
	}
	switch c.Op {
	case OpSet:
		reply(Call{Op: e.set(string(c.Fields[0]), c.Fields[1])})
	case OpSetAll:
		reply(Call{Op: e.setAll(c.Fields)})
	case OpAppend:
		reply(e.append(string(c.Fields[0]), c.Fields[1]))
	case OpHas:
		reply(Call{Op: StatusOK, N: e.has(c.Fields)})
	case OpCount:
		reply(Call{Op: StatusOK, N: int64(len(e.values))})
	case OpGet, OpGetAll, OpWait:
		e.wait(t, c, reply)
	case OpAdd:
		reply(e.add(string(c.Fields[0]), c.N))
	case OpSwap:
		reply(e.swap(string(c.Fields[0]), c.Fields[1], c.Fields[2]))
	case OpDelete:
		reply(Call{Op: StatusOK, N: e.remove(string(c.Fields[0]))})
	case OpBarrier:
		e.arrive(t, c.Op, "user/"+string(c.Fields[0]), reply)
	case OpFinish:
		e.arrive(t, c.Op, finishBarrier, reply)
	}
}

// fieldsOf maps an operation to its number of fields, or to -1 if it accepts any number.
var fieldsOf = map[byte]int{
	OpSet: 2, OpGet: 1, OpWait: -1, OpAdd: 1, OpSwap: 3, OpDelete: 1, OpBarrier: 1, OpFinish: 0,
	OpGetAll: -1, OpSetAll: -1, OpAppend: 2, OpHas: -1, OpCount: 0,
}

// CheckCall validates the shape and the sizes of a call.
func CheckCall(c Call) byte {
	n, known := fieldsOf[c.Op]
	if !known || n >= 0 && n != len(c.Fields) || c.Op == OpSetAll && len(c.Fields)%2 != 0 {
		return statusBad
	}
	total := 0
	for i, f := range c.Fields {
		total += len(f) + fieldBytes
		isKey := i == 0 || n < 0 && (c.Op != OpSetAll || i%2 == 0)
		switch {
		case f == nil && (isKey || c.Op != OpSwap):
			return statusBad
		case isKey && len(f) == 0 && c.Op != OpBarrier:
			return StatusNoKey
		case isKey && len(f) > MaxKeyBytes, len(f) > MaxValueBytes:
			return StatusTooLarge
		}
	}
	switch {
	case total > MaxCallBytes:
		return StatusTooLarge
	case n < 0 && keysOf(c) > MaxCallKeys:
		return StatusTooMany
	}
	return StatusOK
}

// keysOf returns the number of keys of a call with any number of them.
func keysOf(c Call) int {
	if c.Op == OpSetAll {
		return len(c.Fields) / 2
	}
	return len(c.Fields)
}

// growth returns how many bytes the store grows if key gets a value in memory for room bytes.
func (e *engine) growth(key string, room int) int {
	old, existed := e.values[key]
	if !existed {
		return len(key) + entryBytes + room
	}
	return room - old.freed()
}

func (e *engine) set(key string, b []byte) byte {
	if e.total()+e.growth(key, len(b)) > MaxStoreBytes {
		return StatusFull
	}
	if e.put(key, e.newValue(b, nil, len(b))) {
		e.wake(key)
	}
	return StatusOK
}

// put sets a value, and reports whether the key is new.
func (e *engine) put(key string, v value) bool {
	old, existed := e.values[key]
	if existed {
		e.drop(old)
	} else {
		e.bytes += len(key) + entryBytes
	}
	if v.buf == nil {
		e.bytes += len(v.b)
	}
	e.values[key] = v
	return !existed
}

// drop takes a value out of the account.
func (e *engine) drop(v value) {
	if v.buf == nil {
		e.bytes -= len(v.b)
	} else {
		v.buf.release()
	}
}

// setAll sets all keys, or none if they do not fit. If a key occurs twice, its
// last value counts.
func (e *engine) setAll(fields [][]byte) byte {
	last := make(map[string][]byte, len(fields)/2)
	for i := 0; i < len(fields); i += 2 {
		last[string(fields[i])] = fields[i+1]
	}
	grow := 0
	for key, b := range last {
		grow += e.growth(key, len(b))
	}
	if e.total()+grow > MaxStoreBytes {
		return StatusFull
	}
	var added []string
	for key, b := range last {
		if e.put(key, e.newValue(b, nil, len(b))) {
			added = append(added, key)
		}
	}
	for _, key := range added { // when all have their values, because a call may wait for several
		e.wake(key)
	}
	return StatusOK
}

// append adds bytes to the end of a value; n of the reply is the length of the result. A long value has room for more,
// so that many small additions do not copy it each time.
func (e *engine) append(key string, more []byte) Call {
	old := e.values[key]
	n := len(old.b) + len(more)
	if n > MaxValueBytes {
		return Call{Op: StatusTooLarge}
	}
	if old.buf != nil && n <= cap(old.b) {
		e.values[key] = value{append(old.b, more...), old.buf} // behind what queued replies have
		return Call{Op: StatusOK, N: int64(n)}
	}
	room := n
	if twice := min(2*n, MaxValueBytes); n >= shareFrom && e.total()+e.growth(key, twice) <= MaxStoreBytes {
		room = twice
	}
	if e.total()+e.growth(key, room) > MaxStoreBytes {
		return Call{Op: StatusFull}
	}
	if e.put(key, e.newValue(old.b, more, room)) {
		e.wake(key)
	}
	return Call{Op: StatusOK, N: int64(n)}
}

// has returns 1 if all keys have values.
func (e *engine) has(keys [][]byte) int64 {
	for _, key := range keys {
		if _, ok := e.values[string(key)]; !ok {
			return 0
		}
	}
	return 1
}

func (e *engine) remove(key string) int64 {
	v, ok := e.values[key]
	if !ok {
		return 0
	}
	e.bytes -= len(key) + entryBytes
	e.drop(v)
	delete(e.values, key)
	for w := range e.byKey[key] {
		w.absent++
	}
	return 1
}

func (e *engine) add(key string, delta int64) Call {
	var n int64
	if v, ok := e.values[key]; ok {
		var err error
		if n, err = strconv.ParseInt(string(v.b), 10, 64); err != nil {
			return Call{Op: StatusNotNumber}
		}
	}
	if delta > 0 && n > math.MaxInt64-delta || delta < 0 && n < math.MinInt64-delta {
		return Call{Op: StatusNotNumber}
	}
	n += delta
	return Call{Op: e.set(key, strconv.AppendInt(nil, n, 10)), N: n}
}

// swap sets key to next if its value is old; n of the reply is 1 on success.
func (e *engine) swap(key string, old, next []byte) Call {
	v, ok := e.values[key]
	if ok != (old != nil) || !bytes.Equal(v.b, old) {
		return Call{Op: StatusOK}
	}
	if next == nil {
		e.remove(key)
		return Call{Op: StatusOK, N: 1}
	}
	if status := e.set(key, next); status != StatusOK {
		return Call{Op: status}
	}
	return Call{Op: StatusOK, N: 1}
}

// arrive adds a rank to a barrier, which opens when all ranks have arrived.
func (e *engine) arrive(t ticket, op byte, name string, reply func(Call)) {
	b := e.barriers[name]
	if b == nil {
		b = &barrier{come: map[int]*waiter{}}
		e.barriers[name] = b
	}
	if b.come[t.rank] != nil {
		reply(Call{Op: StatusBusy})
		return
	}
	w := &waiter{ticket: t, op: op, barrier: name, bytes: len(name) + entryBytes, reply: reply}
	if status := e.addWaiter(w); status != StatusOK {
		if len(b.come) == 0 {
			delete(e.barriers, name)
		}
		reply(Call{Op: status})
		return
	}
	b.come[t.rank] = w
	e.wakeWaiters(name)
}

// wakeWaiters opens a barrier if all ranks have arrived, or fails it if a missing rank
// has left. For the barrier of Shutdown, ranks that left count as arrived.
func (e *engine) wakeWaiters(name string) {
	b := e.barriers[name]
	var gone []int // missing ranks that have left
	for r := range e.left {
		if b.come[r] == nil {
			gone = append(gone, r)
		}
	}
	reply := Call{Op: StatusOK}
	switch missing := e.size - len(b.come); {
	case missing == 0, name == finishBarrier && len(gone) == missing:
	case len(gone) > 0 && name != finishBarrier:
		slices.Sort(gone)
		reply = Call{Op: StatusLeft, Fields: rankFields(gone)}
	default:
		return
	}
	delete(e.barriers, name)
	for _, rank := range slices.Sorted(maps.Keys(b.come)) {
		e.exit(b.come[rank])
		b.come[rank].reply(reply)
	}
}

func (e *engine) missing(b *barrier) []int {
	var ranks []int
	for r := range e.size {
		if b.come[r] == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// cancel cancels a waiting call. A barrier replies with the missing ranks,
// while other calls do not reply, because the caller no longer waits.
func (e *engine) cancel(t ticket) {
	w := e.waiting[t]
	if w == nil {
		return
	}
	if w.op != OpBarrier && w.op != OpFinish {
		e.forget(w)
		return
	}
	e.exit(w)
	b := e.barriers[w.barrier]
	w.reply(Call{Op: StatusAbsent, Fields: rankFields(e.missing(b))})
	delete(b.come, t.rank)
	if len(b.come) == 0 {
		delete(e.barriers, w.barrier)
	}
}

// dropRank records that a rank left, and fails barriers that wait for it.
func (e *engine) dropRank(rank int) {
	e.left[rank] = true
	for t, w := range e.waiting {
		if t.rank == rank && w.op != OpBarrier && w.op != OpFinish {
			e.forget(w)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(e.barriers)) {
		e.wakeWaiters(name)
	}
}

func rankFields(ranks []int) [][]byte {
	fs := make([][]byte, 0, len(ranks))
	for _, r := range ranks {
		fs = append(fs, strconv.AppendInt(nil, int64(r), 10))
	}
	return fs
}

func FieldRanks(fs [][]byte) []int {
	var ranks []int
	for _, f := range fs {
		if r, err := strconv.Atoi(string(f)); err == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}
