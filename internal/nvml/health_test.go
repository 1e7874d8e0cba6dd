package nvml

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
	"github.com/gochorus/chorus/internal/env"
)

// fakeHealth completes fake with the functions of Health. Each value differs, so that a swapped
// argument or field is found.
const fakeHealth = fake + `
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci;
typedef struct { unsigned field, scope; long long timestamp, latency; int type; int ret; union { double d; unsigned u; unsigned long long ull; } v; } value;
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; } fabric;
int nvmlDeviceGetName(int *d, char *s, unsigned n) { HAS(d); strncpy(s, "NVIDIA H200", n); return OK; }
int nvmlDeviceGetPciInfo_v3(int *d, pci *p) { HAS(d); memset(p, 1, sizeof *p); strcpy(p->legacy, "0000:0B:00.0"); strcpy(p->bus_id, "00000000:0A:00.0"); return OK; }
int nvmlDeviceGetPersistenceMode(int *d, int *m) { HAS(d); *m = 1; return OK; }
int nvmlDeviceGetComputeMode(int *d, int *m) { HAS(d); *m = 3; return OK; }
int nvmlDeviceGetEccMode(int *d, int *now, int *later) { HAS(d); *now = 1; *later = 0; return OK; }
int nvmlDeviceGetTotalEccErrors(int *d, int kind, int counter, unsigned long long *n) { HAS(d); *n = 10 + 2 * kind + counter; return OK; }
int nvmlDeviceGetMemoryErrorCounter(int *d, int kind, int counter, int where, unsigned long long *n) { HAS(d); *n = 100 * kind + 10 * counter + where; return OK; }
int nvmlDeviceGetRemappedRows(int *d, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) { HAS(d); *c = 5; *u = 6; *pending = 1; *failed = 0; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(int *d, unsigned long long *r) { HAS(d); *r = 0x1000000060ull; return OK; }
int nvmlDeviceGetPowerManagementLimit(int *d, unsigned *mw) { HAS(d); *mw = 500000; return OK; }
int nvmlDeviceGetPowerManagementDefaultLimit(int *d, unsigned *mw) { HAS(d); *mw = 700000; return OK; }
int nvmlDeviceGetPcieReplayCounter(int *d, unsigned *n) { HAS(d); *n = 8; return OK; }
int nvmlDeviceGetNvLinkErrorCounter(int *d, unsigned link, int counter, unsigned long long *n) { HAS(d); *n = 1000ull * link + counter; return OK; }
int nvmlDeviceGetFieldValues(int *d, int n, value *v) {
	HAS(d);
	if (n != 1) return INVALID;
	v->ret = OK;
	if (v->field == 164) { v->type = 1; v->v.u = 26562 + v->scope; return OK; }
	if (v->field == 230) { v->type = 3; v->v.ull = 4; return OK; }
	v->ret = UNSUPPORTED;
	return OK;
}
int nvmlDeviceGetGpuFabricInfoV(int *d, fabric *f) {
	HAS(d);
	if (f->version != (sizeof *f | 2 << 24)) return 25; // NVML_ERROR_ARGUMENT_VERSION_MISMATCH
	f->status = 7; f->clique = 9; f->state = 3; f->health = 0x201; return OK;
}
`

// openAll opens the library of a source by every binding.
func openAll(t *testing.T, source string, test func(t *testing.T, api API)) {
	t.Setenv(env.LibNVML.Name, dltest.Compile(t, source, "libnvidia-ml.so.1"))
	for name, bind := range bindings {
		t.Run(name, func(t *testing.T) {
			api, err := dl.Once(spec, func(find dl.Resolver, path string) (API, error) { return start(bind(find, path)) })()
			require.NoError(t, err)
			test(t, api)
		})
	}
}

// healthOf reads all values. An error replaces a value.
func healthOf(t *testing.T, dev Device) map[string]any {
	d, err := HealthOf(dev)
	require.NoError(t, err)
	all := map[string]any{}
	add := func(name string, err error, v ...any) {
		if all[name] = v; err != nil {
			all[name] = err
		}
	}
	s, err := d.Name()
	add("name", err, s)
	s, err = d.PCIBusID()
	add("pci", err, s)
	on, err := d.Persistence()
	add("persistence", err, on)
	mode, err := d.ComputeMode()
	add("compute mode", err, mode)
	now, later, err := d.ECCMode()
	add("ecc mode", err, now, later)
	var n [4]uint64
	var errs [4]error
	for i := range n {
		n[i], errs[i] = d.ECCErrors(i/2 == 1, i%2 == 1)
	}
	add("ecc errors", errors.Join(errs[:]...), n)
	n[0], errs[0] = d.CorrectedErrors(DRAM)
	n[1], errs[1] = d.CorrectedErrors(SRAM)
	add("corrected", errors.Join(errs[:2]...), n[0], n[1])
	rows, err := d.RemappedRows()
	add("rows", err, rows)
	events, err := d.ClockEvents()
	add("clocks", err, events)
	limit, err := d.PowerLimit()
	add("limit", err, limit)
	limit, err = d.DefaultPowerLimit()
	add("default limit", err, limit)
	replays, err := d.PCIeReplays()
	add("replays", err, replays)
	n[0], err = d.NVLinkErrors(17, LinkCRC)
	add("link errors", err, n[0])
	speed, err := d.NVLinkSpeed(3)
	add("link speed", err, speed)
	action, err := d.RecoveryAction()
	add("action", err, action)
	fabric, err := d.Fabric()
	add("fabric", err, fabric)
	return all
}

func TestHealth(t *testing.T) {
	openAll(t, fakeHealth, func(t *testing.T, api API) {
		d, err := api.Device("GPU-aaaa")
		require.NoError(t, err)
		all := healthOf(t, d)
		require.Equal(t, map[string]any{
			"name": []any{"NVIDIA H200"}, "pci": []any{"0000:0a:00.0"}, "persistence": []any{true}, "compute mode": []any{ModeExclusive},
			"ecc mode": []any{true, false}, "ecc errors": []any{[4]uint64{10, 11, 12, 13}}, "corrected": []any{uint64(2), uint64(7)},
			"rows": []any{&RemappedRows{5, 6, true, false}}, "clocks": []any{ClockEvents(0x1000000060)}, "limit": []any{500000},
			"default limit": []any{700000}, "replays": []any{8}, "link errors": []any{uint64(17002)}, "link speed": []any{26565},
			"action": []any{RecoverDrain}, "fabric": []any{&Fabric{FabricCompleted, 7, 0x201}},
		}, all)
		require.True(t, all["fabric"].([]any)[0].(*Fabric).DegradedBandwidth())
		require.True(t, all["fabric"].([]any)[0].(*Fabric).Misconfigured())
		d, err = api.Device("GPU-bbbb") // has MIG, but no other value
		require.NoError(t, err)
		h, err := HealthOf(d)
		require.NoError(t, err)
		current, pending, err := h.MIGMode()
		require.NoError(t, err)
		require.Equal(t, []bool{true, false}, []bool{current, pending})
		for name, v := range healthOf(t, d) {
			require.ErrorIs(t, v.(error), errors.ErrUnsupported, name)
		}
	})
}

// The functions of Health are optional. go-nvml would end the process if it called a missing one.
func TestHealthOfOtherLibraries(t *testing.T) {
	openAll(t, fake, func(t *testing.T, api API) {
		d, err := api.Device("GPU-aaaa")
		require.NoError(t, err)
		for name, v := range healthOf(t, d) {
			require.ErrorIs(t, v.(error), errors.ErrUnsupported, name)
			require.ErrorContains(t, v.(error), "needs a driver with nvmlDeviceGet", name)
		}
	})
}
