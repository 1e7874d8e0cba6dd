package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gochorus/chorus/internal/job"
)

// A Store is a view of the job's key-value store: all keys of the world, or those with a prefix
// (torch.distributed.TCPStore, PrefixStore). A Session and a World have its methods. Each epoch of
// an elastic job has its own keys. Methods are safe for concurrent use. Calls wait for the
// coordinator, and with a ctx without deadline as long as JoinConfig.Timing.Call allows. A key is
// not empty and has at most 1 KiB with its prefix, a value at most 1 MiB. The keys
// and values of one call have at most 2 MiB together, and the whole store with all waiting calls 64 MiB.
type Store struct {
	calls   job.Caller
	rank    int           // of this process, for errors
	timeout time.Duration // of calls whose context has no deadline
	prefix  string
}

// view is embedded by membership: the name of an embedded Store would be exported.
type view = Store

// Prefix returns the part of the store whose keys begin with prefix and a
// slash, which its methods add to all keys (torch.distributed.PrefixStore). An
// empty prefix adds nothing.
func (s *Store) Prefix(prefix string) *Store {
	part := *s
	if prefix != "" {
		part.prefix += prefix + "/"
	}
	return &part
}

// Set sets the value of key. It copies value before it returns, and returns when
// the coordinator has stored it.
func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	_, err := s.do(ctx, "set", key, job.Call{Op: job.OpSet, Fields: [][]byte{s.key(key), present(value)}})
	return err
}

// SetAll sets all keys at once, or none of them if it fails (multi_set).
func (s *Store) SetAll(ctx context.Context, values map[string][]byte) error {
	c := job.Call{Op: job.OpSetAll}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		c.Fields = append(c.Fields, s.key(key), present(values[key]))
	}
	_, err := s.do(ctx, "set", several(slices.Sorted(maps.Keys(values))), c)
	return err
}

// Append adds bytes to the end of the value of key, or sets it if key has no value, and
// returns the length of the value.
func (s *Store) Append(ctx context.Context, key string, more []byte) (int, error) {
	r, err := s.do(ctx, "append", key, job.Call{Op: job.OpAppend, Fields: [][]byte{s.key(key), present(more)}})
	return int(r.N), err
}

// Get waits until key has a value and returns it, as a slice that the caller
// owns.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	values, err := s.values(ctx, key, 1, job.Call{Op: job.OpGet, Fields: [][]byte{s.key(key)}})
	if err != nil {
		return nil, err
	}
	return values[0], nil
}

// GetAll waits until all keys have values, and returns the values that they
// have at one moment, one for each key, as slices that the caller owns
// (multi_get).
func (s *Store) GetAll(ctx context.Context, keys ...string) ([][]byte, error) {
	var once []string
	for _, k := range keys {
		if !slices.Contains(once, k) {
			once = append(once, k)
		}
	}
	values, err := s.values(ctx, several(keys), len(once), job.Call{Op: job.OpGetAll, Fields: s.keys(once)})
	if err != nil {
		return nil, err
	}
	all := make([][]byte, len(keys))
	for i, k := range keys {
		all[i] = bytes.Clone(values[slices.Index(once, k)])
	}
	return all, nil
}

// values runs a call that returns n values.
func (s *Store) values(ctx context.Context, key string, n int, c job.Call) ([][]byte, error) {
	r, err := s.do(ctx, "get", key, c)
	if err != nil {
		return nil, err
	}
	if len(r.Fields) != n {
		return nil, &StoreError{Op: "get", Key: s.prefix + key, Rank: s.rank, Err: job.ErrShortCall}
	}
	for i, f := range r.Fields {
		r.Fields[i] = append([]byte{}, f...)
	}
	return r.Fields, nil
}

// Wait waits until all keys have values.
func (s *Store) Wait(ctx context.Context, keys ...string) error {
	_, err := s.do(ctx, "wait", several(keys), job.Call{Op: job.OpWait, Fields: s.keys(keys)})
	return err
}

// Has reports whether all keys have values, and does not wait for them (check).
func (s *Store) Has(ctx context.Context, keys ...string) (bool, error) {
	r, err := s.do(ctx, "check", several(keys), job.Call{Op: job.OpHas, Fields: s.keys(keys)})
	return r.N == 1, err
}

// NumKeys returns the number of keys of the whole store (num_keys): it counts keys with other
// prefixes and keys of Chorus, too.
func (s *Store) NumKeys(ctx context.Context) (int, error) {
	r, err := s.do(ctx, "count", "all keys", job.Call{Op: job.OpCount, Fields: [][]byte{}})
	return int(r.N), err
}

// Add atomically adds delta to the number in key, or to 0 if key has no value,
// and returns the sum. The value is decimal text: Get returns it, and Set may set
// the initial value.
func (s *Store) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := s.do(ctx, "add", key, job.Call{Op: job.OpAdd, N: delta, Fields: [][]byte{s.key(key)}})
	return r.N, err
}

// CompareAndSwap atomically sets key to next if its value is old, and reports
// whether it did. A nil old means that key must have no value, a nil next deletes
// key; an empty slice is a value.
func (s *Store) CompareAndSwap(ctx context.Context, key string, old, next []byte) (bool, error) {
	r, err := s.do(ctx, "compare-and-swap", key, job.Call{Op: job.OpSwap, Fields: [][]byte{s.key(key), old, next}})
	return r.N == 1, err
}

// Delete deletes key and reports whether it had a value.
func (s *Store) Delete(ctx context.Context, key string) (bool, error) {
	r, err := s.do(ctx, "delete", key, job.Call{Op: job.OpDelete, Fields: [][]byte{s.key(key)}})
	return r.N == 1, err
}

// key returns a key as the coordinator knows it, except that an empty key stays
// empty, and is refused.
func (s *Store) key(key string) []byte {
	if key == "" {
		return []byte{}
	}
	return []byte(s.prefix + key)
}

func (s *Store) keys(keys []string) [][]byte {
	fields := make([][]byte, len(keys))
	for i, k := range keys {
		fields[i] = s.key(k)
	}
	return fields
}

// present replaces nil, which means the absence of a value in calls, by an empty value.
func present(value []byte) []byte {
	if value == nil {
		return []byte{}
	}
	return value
}

// several describes keys for errors.
func several(keys []string) string {
	switch len(keys) {
	case 0:
		return "0 keys"
	case 1:
		return keys[0]
	}
	return fmt.Sprintf("%s and %d more", clip(keys[0]), len(keys)-1)
}

// Last is like Get but does not end with the session's context: after a loss it
// still reads earlier values, while the coordinator exists, which is only for a
// short time. ctx must have an end: nothing else limits the wait for a key
// without a value.
func (s *membership) Last(ctx context.Context, key string) ([]byte, error) {
	r, ok := s.calls.(job.Remote)
	if !ok {
		return s.Get(ctx, key)
	}
	e := &StoreError{Op: "get", Key: key, Rank: s.Rank()}
	c := job.Call{Op: job.OpGet, Fields: [][]byte{[]byte(key)}}
	if status := job.CheckCall(c); status != job.StatusOK {
		e.Err = statusError(status)
		return nil, e
	}
	got, err := r.Last(ctx, c)
	switch {
	case err != nil:
		e.Err = err
	case got.Op != job.StatusOK:
		e.Err = statusError(got.Op)
	case len(got.Fields) != 1:
		e.Err = job.ErrShortCall
	default:
		return bytes.Clone(got.Fields[0]), nil
	}
	return nil, e
}

// Barrier waits until all ranks have called Barrier with the same name, which
// can be reused afterwards. If ctx ends first, the *BarrierError lists the
// missing ranks, and this rank no longer counts as arrived.
func (s *membership) Barrier(ctx context.Context, name string) error {
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	r, err := s.calls.Call(ctx, job.Call{Op: job.OpBarrier, Fields: [][]byte{[]byte(name)}})
	return s.barrierError(name, r, err)
}

// barrierError converts a barrier's reply to an error, or nil if it opened.
func (s *membership) barrierError(name string, r job.Call, err error) error {
	e := &BarrierError{Name: name, Rank: s.Rank(), Err: err}
	switch {
	case err == nil && r.Op == job.StatusOK:
		return nil
	case r.Op == job.StatusAbsent:
		e.Missing = job.FieldRanks(r.Fields)
	case r.Op == job.StatusLeft:
		e.Left = job.FieldRanks(r.Fields)
		e.Missing = e.Left
	case err == nil:
		e.Err = statusError(r.Op)
	}
	return e
}

// do runs one call with the default deadline, and returns an error that
// describes the call.
func (s *Store) do(ctx context.Context, op, key string, c job.Call) (job.Call, error) {
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	e := &StoreError{Op: op, Key: s.prefix + key, Rank: s.rank}
	if status := job.CheckCall(c); status != job.StatusOK { // fail before sending
		e.Err = statusError(status)
		return job.Call{}, e
	}
	r, err := s.calls.Call(ctx, c)
	switch {
	case err != nil && (c.Op == job.OpGet || c.Op == job.OpGetAll || c.Op == job.OpWait) && errors.Is(err, context.DeadlineExceeded):
		e.Note, e.Err = "no process has set it", err
	case err != nil:
		e.Err = err
	case r.Op != job.StatusOK:
		e.Err = statusError(r.Op)
	default:
		return r, nil
	}
	return job.Call{}, e
}

// statusError converts the status of a reply to an error.
func statusError(status byte) error {
	switch status {
	case job.StatusTooLarge:
		return fmt.Errorf("%w: keys have at most %d bytes, values %d, all of one call %d", ErrTooLarge, job.MaxKeyBytes, job.MaxValueBytes, 2*job.MaxValueBytes)
	case job.StatusFull:
		return fmt.Errorf("%w: %d bytes for all keys and values", ErrStoreFull, job.MaxStoreBytes)
	case job.StatusTooMany:
		return fmt.Errorf("%w: a process waits in at most %d calls, for at most %d keys together", ErrTooLarge, job.MaxWaits, job.MaxWaitKeys)
	case job.StatusNotNumber:
		return errNotNumber
	case job.StatusBusy:
		return errBusy
	case job.StatusStale:
		return errStale
	case job.StatusNoKey:
		return errNoKey
	}
	return fmt.Errorf("the coordinator rejected this call (status %d)", status)
}
