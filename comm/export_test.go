package comm

import (
	"context"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// How the coalesced functions divide tensors.
var (
	BucketsThatReach = func(ts []tensor.Tensor, n int) [][]int { return limit{n, true}.buckets(ts) }
	BucketsWithin    = func(ts []tensor.Tensor, n int) [][]int { return limit{n, false}.buckets(ts) }
)

// SetDirectBytes lets copies by themselves and NCCL take over from one kernel at another
// size, for a test; -1 is at once.
func SetDirectBytes(t testing.TB, n int) {
	old := directBytes
	directBytes = n
	t.Cleanup(func() { directBytes = old })
}

// SetCloseTimeout changes how long Close waits for the devices.
func SetCloseTimeout(t testing.TB, d time.Duration) {
	old := closeTimeout
	closeTimeout = d
	t.Cleanup(func() { closeTimeout = old })
}

// SetPairBytes does so for operations with one other device.
func SetPairBytes(t testing.TB, n int) {
	old := pairBytes
	pairBytes = n
	t.Cleanup(func() { pairBytes = old })
}

// SetOwnBytes lets NCCL take over from own kernels at other sizes, for a test.
func SetOwnBytes(t *testing.T, all, part int) {
	t.Cleanup(route.SetKernelBytes(all, part))
}

// SetPushedBytes lets NCCL execute other sizes than those of Pushed, for a test.
func SetPushedBytes(t *testing.T, least int) { t.Cleanup(route.SetPushedBytes(least)) }

// SetOrderedBytes changes the memory of deterministic groups that are made from now on, so that
// small reductions have many rounds.
func SetOrderedBytes(n int) (restore func()) { return route.SetOrderedBytes(n) }

// BlocksWithinHosts is blocksWithinHosts for a test.
var BlocksWithinHosts = blocksWithinHosts

// SetStaged lets groups that are made from now on treat each block of ranks as a host.
func SetStaged(on bool) (restore func()) { return route.SetStaged(on) }

// CompareSums is compareSums for a test.
var CompareSums = compareSums

// Checksum is checksum for a test.
func (g *Group) Checksum(p memory.Slice[byte]) (uint32, error) { return checksum(g, p) }

// Chosen returns the strategy that carries out such a collective.
func (g *Group) Chosen(x collective.Op) Strategy { return g.chosen(x) }

// Choice returns what carries a collective of local rank i out.
func (g *Group) Choice(i int, x collective.Op) Strategy {
	return g.routers[i:min(i+1, len(g.routers))].Chosen(x).Name()
}

// ReadNaN is readNaN.
var ReadNaN = readNaN

// RootCause is rootCause for a test.
func (g *Group) RootCause(err error) error { return g.rootCause(err) }

// NaNKey returns the key of a reported NaN, and that of the end of a rank.
func (g *Group) NaNKey() (nan, ended string) { return g.reporter.nanKey(), g.reporter.endedKey() }

// The strategies of one algorithm.
const (
	OneShot        Strategy = "one-shot"
	TwoShotPackets Strategy = "two-shot-packets"
	TwoShot        Strategy = "two-shot"
	TwoShotLines   Strategy = "two-shot-lines"
	Pipelined      Strategy = "pipelined"
)

// TunePlan returns the measurements that Tune will make.
func TunePlan(g *Group, cfg *TuneConfig) ([]Choice, error) {
	return g.plan(cfg.plan())
}

// Analyzed adds the verdict of the flight recorders and the RAS service to an error, as after a timeout.
// It waits at most limit for the answers.
func Analyzed(ctx context.Context, g *Group, limit time.Duration, err error) error {
	c := g.members[0].comm
	service := g.reporter.askService(c)
	g.reporter.askForDumps(ctx, c)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return g.reporter.analyzed(ctx, c, service, err)
}

// A Deleter is what a Rendezvous needs so that dumps are deleted.
type Deleter = deleter

// DumpKey returns the key of a rank's flight recorders.
func DumpKey(g *Group, rank int) string { return g.reporter.dumpKey(rank) }

// ServiceAddress returns the address of the RAS service of a group, or "".
func ServiceAddress(g *Group) string { return serviceAddress(g.members[0].comm) }

// Analyst reports whether a rank compares the dumps of all ranks.
var Analyst = analyst

// ExchangeBy is the exchange of Join.
var ExchangeBy = exchangeBy

// FirstAnswer is the wait of Group.Err.
var FirstAnswer = firstAnswer

// LeftError is the error of a Shutdown for the answer of rank 0.
var LeftError = errLeft
