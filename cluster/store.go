package cluster

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

	// maxCallBytes is the maximum for all keys and values of a call or of its reply.
	maxCallBytes = 2*MaxValueBytes + MaxKeyBytes + 1024
	fieldBytes   = 4 // the length of a key or value in a message

	// entryBytes is the approximate overhead of a key.
	entryBytes = 192
	// maxCallKeys limits the keys of a call: each costs the coordinator more time than its bytes suggest.
	maxCallKeys = maxWaitKeys
)

// Operations of a call.
const (
	opSet     byte = iota + 1 // fields: key, value
	opGet                     // key; waits
	opWait                    // keys; waits
	opAdd                     // n, key
	opSwap                    // key, old, new; a nil old means absent, a nil new delete
	opDelete                  // key
	opBarrier                 // name; waits
	opFinish                  // none; waits: the barrier of Shutdown
	opGetAll                  // keys; waits
	opSetAll                  // key, value, key, value, …
	opAppend                  // key, value
	opHas                     // keys
	opCount                   // none
)

// Statuses of a reply.
const (
	statusOK        byte = iota
	statusTooLarge       // a limit of one key or value
	statusFull           // MaxStoreBytes
	statusNotNumber      // Add
	statusBusy           // Barrier
	statusAbsent         // Barrier: cancelled; fields are the missing ranks
	statusLeft           // Barrier: fields are the ranks that left
	statusBad            // invalid call
	statusTooMany        // maxWaits or maxWaitKeys
	statusStale          // the call belongs to another epoch
	statusNoKey          // a key is empty
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

// close releases all values. Queued replies keep theirs.
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
	reply   func(call)
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

// do runs one call. It replies immediately, or later if the call waits.
func (e *engine) do(t ticket, c call, reply func(call)) {
	if status := checkCall(c); status != statusOK {
		reply(call{op: status})
		return
	}
	switch c.op {
	case opSet:
		reply(call{op: e.set(string(c.fields[0]), c.fields[1])})
	case opSetAll:
		reply(call{op: e.setAll(c.fields)})
	case opAppend:
		reply(e.append(string(c.fields[0]), c.fields[1]))
	case opHas:
		reply(call{op: statusOK, n: e.has(c.fields)})
	case opCount:
		reply(call{op: statusOK, n: int64(len(e.values))})
	case opGet, opGetAll, opWait:
		e.wait(t, c, reply)
	case opAdd:
		reply(e.add(string(c.fields[0]), c.n))
	case opSwap:
		reply(e.swap(string(c.fields[0]), c.fields[1], c.fields[2]))
	case opDelete:
		reply(call{op: statusOK, n: e.remove(string(c.fields[0]))})
	case opBarrier:
		e.arrive(t, c.op, "user/"+string(c.fields[0]), reply)
	case opFinish:
		e.arrive(t, c.op, finishBarrier, reply)
	}
}

// fieldsOf maps an operation to its number of fields, or to -1 if it accepts any number.
var fieldsOf = map[byte]int{
	opSet: 2, opGet: 1, opWait: -1, opAdd: 1, opSwap: 3, opDelete: 1, opBarrier: 1, opFinish: 0,
	opGetAll: -1, opSetAll: -1, opAppend: 2, opHas: -1, opCount: 0,
}

// checkCall validates the shape and the sizes of a call.
func checkCall(c call) byte {
	n, known := fieldsOf[c.op]
	if !known || n >= 0 && n != len(c.fields) || c.op == opSetAll && len(c.fields)%2 != 0 {
		return statusBad
	}
	total := 0
	for i, f := range c.fields {
		total += len(f) + fieldBytes
		isKey := i == 0 || n < 0 && (c.op != opSetAll || i%2 == 0)
		switch {
		case f == nil && (isKey || c.op != opSwap):
			return statusBad
		case isKey && len(f) == 0 && c.op != opBarrier:
			return statusNoKey
		case isKey && len(f) > MaxKeyBytes, len(f) > MaxValueBytes:
			return statusTooLarge
		}
	}
	switch {
	case total > maxCallBytes:
		return statusTooLarge
	case n < 0 && keysOf(c) > maxCallKeys:
		return statusTooMany
	}
	return statusOK
}

// keysOf returns the number of keys of a call with any number of them.
func keysOf(c call) int {
	if c.op == opSetAll {
		return len(c.fields) / 2
	}
	return len(c.fields)
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
		return statusFull
	}
	if e.put(key, e.newValue(b, nil, len(b))) {
		e.wake(key)
	}
	return statusOK
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

// setAll sets all keys, or none if they do not fit. The last value of a key counts.
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
		return statusFull
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
	return statusOK
}

// append adds bytes to the end of a value; n of the reply is the length of the result. A long value has room for more,
// so that many small additions do not copy it each time.
func (e *engine) append(key string, more []byte) call {
	old := e.values[key]
	n := len(old.b) + len(more)
	if n > MaxValueBytes {
		return call{op: statusTooLarge}
	}
	if old.buf != nil && n <= cap(old.b) {
		e.values[key] = value{append(old.b, more...), old.buf} // behind what queued replies have
		return call{op: statusOK, n: int64(n)}
	}
	room := n
	if twice := min(2*n, MaxValueBytes); n >= shareFrom && e.total()+e.growth(key, twice) <= MaxStoreBytes {
		room = twice
	}
	if e.total()+e.growth(key, room) > MaxStoreBytes {
		return call{op: statusFull}
	}
	if e.put(key, e.newValue(old.b, more, room)) {
		e.wake(key)
	}
	return call{op: statusOK, n: int64(n)}
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

func (e *engine) add(key string, delta int64) call {
	var n int64
	if v, ok := e.values[key]; ok {
		var err error
		if n, err = strconv.ParseInt(string(v.b), 10, 64); err != nil {
			return call{op: statusNotNumber}
		}
	}
	if delta > 0 && n > math.MaxInt64-delta || delta < 0 && n < math.MinInt64-delta {
		return call{op: statusNotNumber}
	}
	n += delta
	return call{op: e.set(key, strconv.AppendInt(nil, n, 10)), n: n}
}

// swap sets key to next if its value is old; n of the reply is 1 on success.
func (e *engine) swap(key string, old, next []byte) call {
	v, ok := e.values[key]
	if ok != (old != nil) || !bytes.Equal(v.b, old) {
		return call{op: statusOK}
	}
	if next == nil {
		e.remove(key)
		return call{op: statusOK, n: 1}
	}
	if status := e.set(key, next); status != statusOK {
		return call{op: status}
	}
	return call{op: statusOK, n: 1}
}

// arrive adds a rank to a barrier, which opens when all ranks have arrived.
func (e *engine) arrive(t ticket, op byte, name string, reply func(call)) {
	b := e.barriers[name]
	if b == nil {
		b = &barrier{come: map[int]*waiter{}}
		e.barriers[name] = b
	}
	if b.come[t.rank] != nil {
		reply(call{op: statusBusy})
		return
	}
	w := &waiter{ticket: t, op: op, barrier: name, bytes: len(name) + entryBytes, reply: reply}
	if status := e.addWaiter(w); status != statusOK {
		if len(b.come) == 0 {
			delete(e.barriers, name)
		}
		reply(call{op: status})
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
	reply := call{op: statusOK}
	switch missing := e.size - len(b.come); {
	case missing == 0, name == finishBarrier && len(gone) == missing:
	case len(gone) > 0 && name != finishBarrier:
		slices.Sort(gone)
		reply = call{op: statusLeft, fields: rankFields(gone)}
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

// cancel cancels a waiting call. A barrier replies with the missing ranks; other
// calls do not reply, because the caller no longer waits.
func (e *engine) cancel(t ticket) {
	w := e.waiting[t]
	if w == nil {
		return
	}
	if w.op != opBarrier && w.op != opFinish {
		e.forget(w)
		return
	}
	e.exit(w)
	b := e.barriers[w.barrier]
	w.reply(call{op: statusAbsent, fields: rankFields(e.missing(b))})
	delete(b.come, t.rank)
	if len(b.come) == 0 {
		delete(e.barriers, w.barrier)
	}
}

// dropRank records that a rank left, and fails barriers that wait for it.
func (e *engine) dropRank(rank int) {
	e.left[rank] = true
	for t, w := range e.waiting {
		if t.rank == rank && w.op != opBarrier && w.op != opFinish {
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

func fieldRanks(fs [][]byte) []int {
	var ranks []int
	for _, f := range fs {
		if r, err := strconv.Atoi(string(f)); err == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}
