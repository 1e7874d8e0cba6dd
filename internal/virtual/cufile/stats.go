package cufile

import (
	"math/bits"
	"time"

	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// stats counts operations. Averages and rates are computed on request.
type stats struct {
	level         int32
	on            bool
	since         time.Time
	ran           time.Duration // time of collection before since
	l1            cufileapi.StatsLevel1
	reads, writes [cufileapi.SizeBuckets]uint64
	gpus          [cufileapi.MaxStatsGPUs]cufileapi.PerGPUStats
}

// open reads the level from the parameters.
func (s *stats) open(c *config) {
	if level := c.sizes[cufileapi.ProfileStats]; level > 0 {
		*s = stats{level: int32(level)}
		s.start()
	}
}

func (s *stats) start() {
	if !s.on {
		s.on, s.since = true, time.Now()
	}
}

// counts reports whether statistics of a level are collected.
func (s *stats) counts(level int32) bool { return s.on && s.level >= level }

// count counts a call.
func (s *stats) count(c *cufileapi.OpCounter, ok bool) {
	switch {
	case !s.counts(1):
	case ok:
		c.OK++
	default:
		c.Err++
	}
}

// gpu returns the statistics of the device, or nil if they are not collected.
func (s *stats) gpu(dev *machine.Device) *cufileapi.PerGPUStats {
	if !s.counts(3) || int(dev.Ordinal()) >= len(s.gpus) {
		return nil
	}
	return &s.gpus[dev.Ordinal()]
}

func (s *stats) registered(dev *machine.Device, bytes uint64, ok bool) {
	s.count(&s.l1.BufRegisterOps, ok)
	g := s.gpu(dev)
	if g == nil {
		return
	}
	g.BufRegisters++
	if !ok {
		g.BufRegistersFailed++
		return
	}
	g.BufRegistersOK++
	g.RegisteredBytes += bytes
}

func (s *stats) deregistered(dev *machine.Device, b *buffer) {
	s.count(&s.l1.BufDeregisterOps, b != nil)
	if g := s.gpu(dev); g != nil && b != nil {
		g.BufDeregisters++
		g.RegisteredBytes -= min(b.size, g.RegisteredBytes)
	}
}

// transferred counts a transfer. err is nil or a Result of 0 on success.
func (s *stats) transferred(dev *machine.Device, t *transfer, n int64, err error, took time.Duration) {
	if !s.counts(1) {
		return
	}
	ok := err == nil
	us := uint64(took.Microseconds())
	if t.write {
		s.count(&s.l1.WriteOps, ok)
		s.l1.WriteBytes, s.l1.WriteLatencySum = s.l1.WriteBytes+uint64(n), s.l1.WriteLatencySum+us
	} else {
		s.count(&s.l1.ReadOps, ok)
		s.l1.ReadBytes, s.l1.ReadLatencySum = s.l1.ReadBytes+uint64(n), s.l1.ReadLatencySum+us
	}
	if ok && s.counts(2) {
		hist := &s.reads
		if t.write {
			hist = &s.writes
		}
		hist[sizeBucket(t.size)]++
	}
	if g := s.gpu(dev); g != nil {
		t.tally(g, uint64(n), ok, us)
	}
}

// sizeBucket returns the histogram class of a size: below 2 KiB, below 4 KiB, and so on.
func sizeBucket(bytes uint64) int {
	return min(max(bits.Len64(bytes>>10)-1, 0), cufileapi.SizeBuckets-1)
}

// tally adds the transfer to the statistics of its device.
func (t *transfer) tally(g *cufileapi.PerGPUStats, n uint64, ok bool, us uint64) {
	one, failed, unaligned := uint64(1), uint64(0), uint64(0)
	if !ok {
		one, failed = 0, 1
	}
	if (t.size|uint64(t.fileOffset)|uint64(t.devOffset)|uint64(t.base))%transferPage != 0 {
		unaligned = 1
	}
	if t.write {
		g.Writes, g.PosixWrites, g.WriteErrors, g.UnalignedWrites = g.Writes+one, g.PosixWrites+one, g.WriteErrors+failed, g.UnalignedWrites+unaligned
		g.WriteBytes, g.WriteDuration = g.WriteBytes+n, g.WriteDuration+us
		return
	}
	g.Reads, g.PosixReads, g.ReadErrors, g.UnalignedReads = g.Reads+one, g.PosixReads+one, g.ReadErrors+failed, g.UnalignedReads+unaligned
	g.ReadBytes, g.ReadDuration = g.ReadBytes+n, g.ReadDuration+us
}

// submitted counts the transfers of a batch at their start.
func (s *stats) submitted(entries []*entry) {
	if !s.counts(1) {
		return
	}
	s.l1.LastBatchReadBytes, s.l1.LastBatchWriteBytes = 0, 0
	for _, e := range entries {
		for _, c := range []*cufileapi.OpCounter{&s.l1.BatchEnqueuedOps, &s.l1.BatchPosixEnqueued, &s.l1.BatchTotalSubmitOps} {
			c.OK++
		}
		if e.write {
			s.l1.LastBatchWriteBytes += e.size
		} else {
			s.l1.LastBatchReadBytes += e.size
		}
	}
}

// completed counts a transfer of a batch when GetStatus returns it.
func (s *stats) completed(e *entry) {
	ok := e.event.Status == cufileapi.Complete
	for _, c := range []*cufileapi.OpCounter{&s.l1.BatchCompleteOps, &s.l1.BatchProcessedOps, &s.l1.BatchPosixProcessed} {
		s.count(c, ok)
	}
	switch {
	case !ok || !s.counts(1):
	case e.write:
		s.l1.BatchWriteBytes += uint64(e.event.Ret)
	default:
		s.l1.BatchReadBytes += uint64(e.event.Ret)
	}
}

func (l *lib) SetStatsLevel(level int32) cufileapi.Result {
	_, r := l.enter(cufileapi.FuncSetStatsLevel)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if level < 0 || level > 3 {
		return cufileapi.InvalidValue
	}
	l.stats.level = level
	return cufileapi.Success
}

func (l *lib) GetStatsLevel() (int32, cufileapi.Result) {
	_, r := l.enter(cufileapi.FuncGetStatsLevel)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	return l.stats.level, cufileapi.Success
}

func (l *lib) StatsStart() cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncStatsStart)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if l.stats.level == 0 { // level 0 collects nothing
		return cufileapi.InvalidValue
	}
	l.stats.start()
	return cufileapi.Success
}

func (l *lib) StatsStop() cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncStatsStop)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	l.stats.ran, l.stats.on = l.stats.elapsed(), false
	return cufileapi.Success
}

// elapsed returns the time of collection.
func (s *stats) elapsed() time.Duration {
	if !s.on {
		return s.ran
	}
	return s.ran + time.Since(s.since)
}

func (l *lib) StatsReset() cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncStatsReset)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	l.stats = stats{level: l.stats.level, on: l.stats.on, since: time.Now()}
	return cufileapi.Success
}

func (l *lib) GetStatsL1(s *cufileapi.StatsLevel1) cufileapi.Result {
	return l.tellStats(cufileapi.FuncGetStatsL1, 1, s != nil, func() { *s = l.stats.level1() })
}

func (l *lib) GetStatsL2(s *cufileapi.StatsLevel2) cufileapi.Result {
	return l.tellStats(cufileapi.FuncGetStatsL2, 2, s != nil, func() { *s = l.stats.level2() })
}

func (l *lib) GetStatsL3(s *cufileapi.StatsLevel3) cufileapi.Result {
	return l.tellStats(cufileapi.FuncGetStatsL3, 3, s != nil, func() {
		*s = cufileapi.StatsLevel3{Detailed: l.stats.level2(), NumGPUs: uint32(min(len(l.m.Devices()), cufileapi.MaxStatsGPUs))}
		for i := range s.NumGPUs {
			s.PerGPU[i] = l.stats.perGPU(l.m.Devices()[i])
		}
	})
}

func (l *lib) tellStats(f cufileapi.Func, level int32, valid bool, tell func()) cufileapi.Result {
	_, r := l.enterOpen(f)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if !valid || l.stats.level < level {
		return cufileapi.InvalidValue
	}
	tell()
	return cufileapi.Success
}

func (s *stats) level1() cufileapi.StatsLevel1 {
	v := s.l1
	v.ReadLatencyAverage = ratio(v.ReadLatencySum, float64(v.ReadOps.OK+v.ReadOps.Err))
	v.WriteLatencyAverage = ratio(v.WriteLatencySum, float64(v.WriteOps.OK+v.WriteOps.Err))
	seconds := s.elapsed().Seconds()
	v.ReadBytesPerSecond, v.WriteBytesPerSecond = ratio(v.ReadBytes, seconds), ratio(v.WriteBytes, seconds)
	v.ReadOpsPerSecond, v.WriteOpsPerSecond = ratio(v.ReadOps.OK, seconds), ratio(v.WriteOps.OK, seconds)
	v.BatchReadBandwidth, v.BatchWriteBandwidth = ratio(v.BatchReadBytes, seconds), ratio(v.BatchWriteBytes, seconds)
	v.BatchSubmitOpsPerSecond, v.BatchCompleteOpsPerSecond = ratio(v.BatchSubmitOps.OK, seconds), ratio(v.BatchCompleteOps.OK, seconds)
	return v
}

func (s *stats) level2() cufileapi.StatsLevel2 {
	return cufileapi.StatsLevel2{Basic: s.level1(), ReadSizeHist: s.reads, WriteSizeHist: s.writes}
}

func (s *stats) perGPU(dev *machine.Device) cufileapi.PerGPUStats {
	g := s.gpus[dev.Ordinal()]
	g.UUID = dev.UUID()
	seconds := s.elapsed().Seconds()
	g.ReadBytesPerSecond, g.WriteBytesPerSecond = ratio(g.ReadBytes, seconds), ratio(g.WriteBytes, seconds)
	g.ReadUtilization = min(ratio(g.ReadDuration, seconds*1e4), 100)
	g.WriteUtilization = min(ratio(g.WriteDuration, seconds*1e4), 100)
	return g
}

func ratio(n uint64, per float64) uint64 {
	if per == 0 {
		return 0
	}
	return uint64(float64(n) / per)
}
