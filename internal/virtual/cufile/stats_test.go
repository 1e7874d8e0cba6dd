package cufile

import (
	"os"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/stretchr/testify/require"
)

func TestCuFileStatistics(t *testing.T) {
	r := newFileRig(t, machine.Config{Devices: 2, Faults: "cuFileRead#4=EIO"})
	h, p, w, s := r.register(r.open(1<<20, os.O_RDWR)), r.Alloc(0, 1<<20), r.words(8192), r.Stream(0)
	read := func(bytes uintptr) { _, _ = r.read(h, p, bytes) }
	l3 := func() (v cufileapi.StatsLevel3) { r.fine(r.api.GetStatsL3(&v)); return v }
	require.Equal(t, cufileapi.InvalidValue, r.api.StatsStart(), "there is no level")
	r.fine(r.api.SetStatsLevel(3))
	read(100)
	require.Zero(t, l3().Detailed, "collecting has not begun")
	r.fine(r.api.StatsStart())
	read(1 << 20)
	read(5000)
	_, err := r.read(h, p, 4096)
	require.Error(t, err) // by the plan, before the device is known
	_, err = r.read(h+1, p, 4096)
	require.Error(t, err)
	_, err = r.write(h, p, 8192)
	require.NoError(t, err)
	r.fine(r.readAsync(h, p, w, s))
	r.Sync(0, s)
	r.fine(r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, 4096, 0) }))
	require.NotEqual(t, cufileapi.Success, r.with(0, func() cufileapi.Result { return r.api.BufRegister(p, 4096, 0) }))
	b := r.batch(4)
	r.fine(r.submit(b, r.entries(h, p, 3)))
	r.wait(b, 3)
	r.api.BatchIODestroy(b)

	for range 2 {
		v := l3()
		one := v.Detailed.Basic
		require.Equal(t, cufileapi.OpCounter{OK: 6, Err: 1}, one.ReadOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.WriteOps)
		require.EqualValues(t, 1<<20+5000+8192+3*64, one.ReadBytes)
		require.EqualValues(t, 8192, one.WriteBytes)
		require.Equal(t, cufileapi.OpCounter{OK: 1, Err: 1}, one.BufRegisterOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.BatchSetUpOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.BatchSubmitOps)
		require.Equal(t, cufileapi.OpCounter{OK: 3}, one.BatchCompleteOps)
		require.Equal(t, cufileapi.OpCounter{OK: 3}, one.BatchTotalSubmitOps)
		require.Equal(t, cufileapi.OpCounter{OK: 1}, one.BatchDestroyOps)
		require.EqualValues(t, 192, one.BatchReadBytes)
		require.EqualValues(t, 192, one.LastBatchReadBytes)
		require.Positive(t, one.ReadBytesPerSecond)
		require.GreaterOrEqual(t, one.ReadLatencySum, 6*one.ReadLatencyAverage)
		hist := v.Detailed.ReadSizeHist
		require.Equal(t, []uint64{3, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0}, []uint64{hist[0], hist[1], hist[2], hist[3], hist[4], hist[5], hist[6], hist[7], hist[8], hist[9], hist[10], hist[11]})
		require.EqualValues(t, 1, v.Detailed.WriteSizeHist[3])
		require.EqualValues(t, 2, v.NumGPUs)
		g := v.PerGPU[0]
		uuid, res := r.Drv.DeviceGetUUID(0)
		r.OK(res)
		require.EqualValues(t, uuid, g.UUID)
		require.Equal(t, []uint64{one.ReadBytes, 6, 6, 1, 4, 8192, 1, 1}, []uint64{g.ReadBytes, g.Reads, g.PosixReads, g.ReadErrors, g.UnalignedReads, g.WriteBytes, g.Writes, g.PosixWrites})
		require.Equal(t, []uint64{2, 1, 1, 4096}, []uint64{g.BufRegisters, g.BufRegistersOK, g.BufRegistersFailed, g.RegisteredBytes})
		require.Zero(t, v.PerGPU[1].Reads)
		// What comes after the end of collecting is not counted.
		r.fine(r.api.StatsStop())
		read(4096)
	}
	r.fine(r.api.StatsStart())
	r.fine(r.with(0, func() cufileapi.Result { return r.api.BufDeregister(p) }))
	b = r.batch(4)
	writes := r.entries(h, p, 2)
	writes[0].Opcode, writes[1].Opcode = cufileapi.OpWrite, cufileapi.OpWrite
	r.fine(r.submit(b, writes))
	r.wait(b, 2)
	v := l3()
	require.Equal(t, []uint64{1, 0}, []uint64{v.PerGPU[0].BufDeregisters, v.PerGPU[0].RegisteredBytes})
	require.Equal(t, []uint64{0, 128, 192, 128}, []uint64{v.Detailed.Basic.LastBatchReadBytes, v.Detailed.Basic.LastBatchWriteBytes,
		v.Detailed.Basic.BatchReadBytes, v.Detailed.Basic.BatchWriteBytes})
	r.fine(r.api.StatsReset())
	require.Zero(t, l3().Detailed)
	read(4096)
	require.EqualValues(t, 1, l3().Detailed.Basic.ReadOps.OK, "collecting goes on")
	r.fine(r.api.SetStatsLevel(1))
	require.Equal(t, cufileapi.InvalidValue, r.api.GetStatsL2(new(cufileapi.StatsLevel2)))
	require.Empty(t, r.m.Reports())
}

// Statistics may begin with the driver, and rates are those of the time in which
// they were collected.
func TestCuFileStatisticsFromTheOpening(t *testing.T) {
	r := &fileRig{rig: newRig(t, machine.Config{Devices: 1})}
	r.api = New(r.m)
	r.fine(r.api.SetParameterSizeT(cufileapi.ProfileStats, 1))
	r.fine(r.api.DriverOpen())
	level, res := r.api.GetStatsLevel()
	r.fine(res)
	require.EqualValues(t, 1, level)
	_, err := r.read(r.register(r.open(64, os.O_RDWR)), r.Alloc(0, 64), 64)
	require.NoError(t, err)
	var v cufileapi.StatsLevel1
	r.fine(r.api.GetStatsL1(&v))
	require.EqualValues(t, 64, v.ReadBytes)
	require.EqualValues(t, 1, v.HandleRegisterOps.OK)

	s := stats{level: 1, ran: time.Hour}
	s.start()
	begun := s.since
	s.start() // which began already
	require.Equal(t, begun, s.since)
	require.GreaterOrEqual(t, s.elapsed(), time.Hour)
	s.l1.ReadBytes = 7200
	one := s.level1()
	require.InDelta(t, 2, one.ReadBytesPerSecond, 1)
}
