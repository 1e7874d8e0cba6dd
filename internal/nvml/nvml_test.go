package nvml

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
	"github.com/gochorus/chorus/internal/env"
)

// A library with the functions that are called here. Its first GPU has
// everything, its second nothing, its third is lost, and the second has an
// instance of MIG.
const fake = `
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } process;
enum { OK, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };
static const char *uuids[] = {"GPU-aaaa", "GPU-bbbb", "GPU-cccc", "MIG-dddd"};
static int ids[] = {0, 1, 2, 3};
#define HAS(d) if (*(d) == 2) return LOST; if (*(d) != 0) return UNSUPPORTED
int nvmlInit_v2(void) { return OK; }
const char *nvmlErrorString(int r) { return r == LOST ? "GPU is lost" : r == UNSUPPORTED ? "Not Supported" : "some error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, int **d) { *d = &ids[i]; return OK; }
int nvmlDeviceGetHandleByUUID(const char *u, int **d) {
	for (int i = 0; i < 4; i++) if (!strcmp(u, uuids[i])) { *d = &ids[i]; return OK; }
	return NOT_FOUND;
}
int nvmlDeviceGetUUID(int *d, char *u, unsigned n) { strncpy(u, uuids[*d], n); return OK; }
int nvmlDeviceGetMigMode(int *d, unsigned *now, unsigned *later) {
	if (*d == 0) return UNSUPPORTED;
	*now = *d == 1; *later = 0; return OK;
}
int nvmlDeviceGetUtilizationRates(int *d, utilization *u) { HAS(d); u->gpu = 97; u->memory = 31; return OK; }
int nvmlDeviceGetTemperature(int *d, int sensor, unsigned *t) { HAS(d); *t = sensor == 0 ? 36 : 0; return OK; }
int nvmlDeviceGetPowerUsage(int *d, unsigned *mw) { HAS(d); *mw = 76543; return OK; }
int nvmlDeviceGetClockInfo(int *d, int clock, unsigned *mhz) { HAS(d); *mhz = clock == 1 ? 1980 : 1; return OK; }
int nvmlDeviceGetMemoryInfo(int *d, memory *m) { if (*d == 3) { m->used = 7; return OK; } HAS(d); m->total = 100; m->free = 58; m->used = 42; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(int *d, unsigned *n, process *p) {
	HAS(d);
	if (*n < 40) { *n = 40; return TOO_SMALL; } // more than the first call has room for
	*n = 3;
	p[0] = (process){11, 1 << 20, -1, -1}; p[1] = (process){12, 2 << 20, -1, -1};
	p[2] = (process){13, ~0ull, -1, -1};
	return OK;
}
int nvmlDeviceGetNvLinkState(int *d, unsigned link, int *up) { HAS(d); if (link >= 18) return INVALID; *up = link != 4; return OK; }
`

// bindings has the binding of this build and the one without cgo. They are the same if the test
// is built without cgo.
var bindings = map[string]func(dl.Resolver, string) (raw, error){"this build": bind, "without cgo": bindTable}

// each runs a test with every binding of the fake library.
func each(t *testing.T, test func(t *testing.T, api API)) { openAll(t, fake, test) }

func TestLibrary(t *testing.T) { each(t, testLibrary) }

func testLibrary(t *testing.T, api API) {
	uuids, err := api.UUIDs()
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-aaaa", "GPU-bbbb", "GPU-cccc"}, uuids)
	mig, err := api.MIG()
	require.NoError(t, err)
	require.True(t, mig)

	d, err := api.Device("GPU-aaaa")
	require.NoError(t, err)
	gpu, mem, err := d.Utilization()
	require.NoError(t, err)
	require.Equal(t, []int{97, 31}, []int{gpu, mem})
	for want, read := range map[int]func() (int, error){36: d.Temperature, 76543: d.Power, 1980: d.SMClock} {
		v, err := read()
		require.NoError(t, err)
		require.Equal(t, want, v)
	}
	used, err := d.MemoryUsed()
	require.NoError(t, err)
	require.EqualValues(t, 42, used)
	ps, err := d.Processes()
	require.NoError(t, err)
	require.Equal(t, []Process{{11, 1 << 20}, {12, 2 << 20}, {13, 0}}, ps)
	up, err := d.NVLinks()
	require.NoError(t, err)
	require.Len(t, up, 18)
	for i := range up {
		require.Equal(t, i != 4, up[i], "link %d", i)
	}

	_, err = api.Device("GPU-eeee")
	require.EqualError(t, err, "nvml: nvmlDeviceGetHandleByUUID: some error (6)")
	instance, err := api.Device("GPU-dddd") // as CUDA writes the UUID of an instance
	require.NoError(t, err)
	used, err = instance.MemoryUsed()
	require.NoError(t, err)
	require.EqualValues(t, 7, used)
}

// A sensor that is not there is unsupported, and a GPU that is lost is lost.
func TestLibraryErrors(t *testing.T) { each(t, testLibraryErrors) }

func testLibraryErrors(t *testing.T, api API) {
	for _, uuid := range []string{"GPU-bbbb", "GPU-cccc"} {
		d, err := api.Device(uuid)
		require.NoError(t, err)
		for name, read := range map[string]func() error{
			"nvmlDeviceGetUtilizationRates":        func() error { _, _, err := d.Utilization(); return err },
			"nvmlDeviceGetTemperature":             func() error { _, err := d.Temperature(); return err },
			"nvmlDeviceGetPowerUsage":              func() error { _, err := d.Power(); return err },
			"nvmlDeviceGetClockInfo":               func() error { _, err := d.SMClock(); return err },
			"nvmlDeviceGetMemoryInfo":              func() error { _, err := d.MemoryUsed(); return err },
			"nvmlDeviceGetComputeRunningProcesses": func() error { _, err := d.Processes(); return err },
			"nvmlDeviceGetNvLinkState":             func() error { _, err := d.NVLinks(); return err },
		} {
			err := read()
			require.ErrorContains(t, err, name)
			require.Equal(t, uuid == "GPU-bbbb", errors.Is(err, errors.ErrUnsupported), "%s of %s", name, uuid)
			if uuid == "GPU-cccc" {
				require.EqualError(t, err, "nvml: "+name+": GPU is lost (15)")
			}
		}
	}
}

func TestNoLibrary(t *testing.T) {
	t.Setenv(env.LibNVML.Name, "/nowhere/libnvidia-ml.so.1")
	_, err := dl.Once(spec, openLib)()
	require.ErrorIs(t, err, errors.ErrUnsupported)
	e, ok := errors.AsType[*dl.Error](err)
	require.True(t, ok)
	require.Len(t, e.Tried, 1)
	require.ErrorContains(t, err, "no usable library for NVML (CHORUS_LIBNVML can name its path)")
}

// A library of another system lacks functions. Those of sensors are optional.
func TestOtherLibraries(t *testing.T) {
	const without = "int nvmlInit_v2(void) { return 0; } const char *nvmlErrorString(int r) { return r == 9 ? \"Driver Not Loaded\" : \"?\"; }\n"
	open := func(source string) (API, error) {
		t.Setenv(env.LibNVML.Name, dltest.Compile(t, source, "libnvidia-ml.so.1"))
		return dl.Once(spec, func(find dl.Resolver, path string) (API, error) { return start(bindTable(find, path)) })()
	}
	_, err := open(without)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "Chorus needs the library of driver R535 or newer; this one lacks nvmlDeviceGetCount_v2, nvmlDeviceGetHandleByIndex_v2")
	const handles = "int nvmlDeviceGetCount_v2(void) { return 0; } int nvmlDeviceGetHandleByIndex_v2(void) { return 0; } int nvmlDeviceGetHandleByUUID(void) { return 0; } int nvmlDeviceGetUUID(void) { return 0; }\n"
	api, err := open(without + handles)
	require.NoError(t, err)
	d, err := api.Device("GPU-aaaa")
	require.NoError(t, err)
	_, err = d.Power()
	require.EqualError(t, err, "nvml: needs a driver with nvmlDeviceGetPowerUsage; there is an older one")
	_, err = open(strings.Replace(without+handles, "return 0", "return 9", 1))
	require.EqualError(t, err, "nvml: needs the NVIDIA kernel driver; there is no running driver (Driver Not Loaded)")
}
