package testgpu

import (
	"context"
	"fmt"
	"strconv"
	"sync"
)

// A Board is a comm.Rendezvous for ranks that are goroutines of one process.
type Board struct {
	mu     *sync.Mutex
	values map[string][]byte
	posted *sync.Cond
	ctx    context.Context
	rank   int
	size   int
}

// Boards returns the boards of size ranks.
func Boards(ctx context.Context, size int) []*Board {
	mu := &sync.Mutex{}
	values, posted := map[string][]byte{}, sync.NewCond(mu)
	context.AfterFunc(ctx, posted.Broadcast)
	bs := make([]*Board, size)
	for i := range bs {
		bs[i] = &Board{mu, values, posted, ctx, i, size}
	}
	return bs
}

// Rank returns the rank.
func (b *Board) Rank() int { return b.rank }

// Size returns the number of ranks.
func (b *Board) Size() int { return b.size }

// Context returns the context of all ranks.
func (b *Board) Context() context.Context { return b.ctx }

// Set publishes a value, once for each key.
func (b *Board) Set(_ context.Context, key string, value []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.values[key] != nil {
		return fmt.Errorf("%s is set twice: earlier readers have a stale value", key)
	}
	b.values[key] = value
	b.posted.Broadcast()
	return nil
}

// Get waits for a value.
func (b *Board) Get(ctx context.Context, key string) ([]byte, error) {
	defer context.AfterFunc(ctx, b.posted.Broadcast)()
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.values[key] == nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		b.posted.Wait()
	}
	return b.values[key], nil
}

// Add adds to a number and returns the sum.
func (b *Board) Add(_ context.Context, key string, delta int64) (int64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, _ := strconv.ParseInt(string(b.values[key]), 10, 64) // no value is 0
	b.values[key] = strconv.AppendInt(nil, n+delta, 10)
	b.posted.Broadcast()
	return n + delta, nil
}

// Delete deletes a key and reports whether it had a value.
func (b *Board) Delete(_ context.Context, key string) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, had := b.values[key]
	delete(b.values, key)
	return had, nil
}

// Has reports whether a key has a value.
func (b *Board) Has(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.values[key] != nil
}
