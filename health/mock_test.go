//go:build cgo && !nonvml

package health

import (
	"fmt"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/nvml"
)

// A product describes the GPUs of a machine as NVML reports them.
type product struct {
	name        string
	count       int
	links       int    // NVLinks of a GPU; 0: none
	linkMBs     uint64 // of one of them
	limit       uint32 // in mW
	mig, ecc    bool   // whether the product has the feature
	rows        bool   // whether rows of memory are remapped, from Ampere on
	recoveryAPI bool   // whether the driver has a recovery action
}

var (
	dgxA100 = product{name: "NVIDIA A100-SXM4-80GB", count: 8, links: 12, linkMBs: 25000, limit: 400_000, mig: true, ecc: true, rows: true}
	hgxH100 = product{name: "NVIDIA H100 80GB HBM3", count: 8, links: 18, linkMBs: 26562, limit: 700_000, mig: true, ecc: true, rows: true, recoveryAPI: true}
	gb200   = product{name: "NVIDIA GB200", count: 4, links: 18, linkMBs: 53125, limit: 1_200_000, mig: true, ecc: true, rows: true, recoveryAPI: true}
	l40s    = product{name: "NVIDIA L40S", count: 4, limit: 350_000, ecc: true, rows: true, recoveryAPI: true}
	v100    = product{name: "Tesla V100-SXM2-16GB", count: 4, links: 6, linkMBs: 25781, limit: 300_000, ecc: true}
	rtx4090 = product{name: "NVIDIA GeForce RTX 4090", count: 2, limit: 450_000}
)

// machine returns go-nvml's mock of a healthy machine, and its GPUs, whose functions a test replaces.
func (p product) machine() (*mock.Interface, []*mock.Device) {
	var gpus []*mock.Device
	for i := range p.count {
		gpus = append(gpus, p.gpu(i))
	}
	return &mock.Interface{
		InitFunc:           func() gonvml.Return { return gonvml.SUCCESS },
		ErrorStringFunc:    func(r gonvml.Return) string { return fmt.Sprintf("NVML error %d", r) },
		DeviceGetCountFunc: func() (int, gonvml.Return) { return p.count, gonvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (gonvml.Device, gonvml.Return) {
			return gpus[i], gonvml.SUCCESS
		},
		DeviceGetHandleByUUIDFunc: func(uuid string) (gonvml.Device, gonvml.Return) {
			for _, g := range gpus {
				if u, _ := g.GetUUID(); u == uuid {
					return g, gonvml.SUCCESS
				}
			}
			return nil, gonvml.ERROR_NOT_FOUND
		},
	}, gpus
}

// has returns success, or the result of a product without the feature.
func has(feature bool) gonvml.Return {
	if feature {
		return gonvml.SUCCESS
	}
	return gonvml.ERROR_NOT_SUPPORTED
}

func (p product) gpu(i int) *mock.Device {
	return &mock.Device{
		GetUUIDFunc: func() (string, gonvml.Return) {
			return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i), gonvml.SUCCESS
		},
		GetNameFunc:                    func() (string, gonvml.Return) { return p.name, gonvml.SUCCESS },
		GetMigModeFunc:                 func() (int, int, gonvml.Return) { return 0, 0, has(p.mig) },
		GetComputeModeFunc:             func() (gonvml.ComputeMode, gonvml.Return) { return gonvml.COMPUTEMODE_DEFAULT, gonvml.SUCCESS },
		GetPersistenceModeFunc:         func() (gonvml.EnableState, gonvml.Return) { return gonvml.FEATURE_ENABLED, gonvml.SUCCESS },
		GetMemoryInfoFunc:              func() (gonvml.Memory, gonvml.Return) { return gonvml.Memory{Used: 4 << 20}, gonvml.SUCCESS },
		GetComputeRunningProcessesFunc: func() ([]gonvml.ProcessInfo, gonvml.Return) { return nil, gonvml.SUCCESS },
		GetEccModeFunc: func() (gonvml.EnableState, gonvml.EnableState, gonvml.Return) {
			return gonvml.FEATURE_ENABLED, gonvml.FEATURE_ENABLED, has(p.ecc)
		},
		GetTotalEccErrorsFunc: func(gonvml.MemoryErrorType, gonvml.EccCounterType) (uint64, gonvml.Return) { return 0, has(p.ecc) },
		GetMemoryErrorCounterFunc: func(gonvml.MemoryErrorType, gonvml.EccCounterType, gonvml.MemoryLocation) (uint64, gonvml.Return) {
			return 0, has(p.ecc)
		},
		GetRemappedRowsFunc:                func() (int, int, bool, bool, gonvml.Return) { return 0, 0, false, false, has(p.rows) },
		GetCurrentClocksEventReasonsFunc:   func() (uint64, gonvml.Return) { return 1, gonvml.SUCCESS },
		GetPowerManagementLimitFunc:        func() (uint32, gonvml.Return) { return p.limit, gonvml.SUCCESS },
		GetPowerManagementDefaultLimitFunc: func() (uint32, gonvml.Return) { return p.limit, gonvml.SUCCESS },
		GetNvLinkStateFunc: func(link int) (gonvml.EnableState, gonvml.Return) {
			switch {
			case p.links == 0:
				return 0, gonvml.ERROR_NOT_SUPPORTED
			case link >= p.links:
				return 0, gonvml.ERROR_INVALID_ARGUMENT
			}
			return gonvml.FEATURE_ENABLED, gonvml.SUCCESS
		},
		GetNvLinkErrorCounterFunc: func(int, gonvml.NvLinkErrorCounter) (uint64, gonvml.Return) { return 0, gonvml.SUCCESS },
		GetFieldValuesFunc: func(v []gonvml.FieldValue) gonvml.Return {
			const speed, recovery = 164, 230
			value := uint64(0)
			switch {
			case v[0].FieldId == speed && p.links > 0:
				value = p.linkMBs
			case v[0].FieldId == recovery && p.recoveryAPI:
			default:
				v[0].NvmlReturn = uint32(gonvml.ERROR_NOT_SUPPORTED)
			}
			v[0].ValueType = uint32(gonvml.VALUE_TYPE_UNSIGNED_INT)
			for i := range 4 {
				v[0].Value[i] = byte(value >> (8 * i))
			}
			return gonvml.SUCCESS
		},
	}
}

// gpuChecks are the checks that NVML alone answers.
var gpuChecks = []*Check{mig, computeMode, otherProcesses, persistence, recoveryAction, rowRemap, ecc, nvlink, clocks, powerLimit}

// mocked runs gpuChecks on a mock, and returns the verdict of each GPU by the name of the check.
func mocked(t *testing.T, api gonvml.Interface) map[string][]Verdict {
	t.Helper()
	w := healthy()
	w.listGPUs = func() ([]*gpu, error) {
		a, err := nvml.Of(api)
		if err != nil {
			return nil, err
		}
		return gpusOf(a)
	}
	all := map[string][]Verdict{}
	for i, r := range Run(t.Context(), w.Host, gpuChecks) {
		if r.GPU != nil {
			require.Equal(t, len(all[r.ID]), *r.GPU, "result %d", i)
		}
		all[r.ID] = append(all[r.ID], r.Verdict)
	}
	return all
}

// Healthy machines of six kinds: a check passes, or is unknown because the product has no such value. Nothing is a
// warning, and nothing fails.
func TestProductsByNVML(t *testing.T) {
	for _, x := range []struct {
		product
		unknown []string
	}{
		{dgxA100, []string{"recovery-action"}}, // the driver is older than the field
		{hgxH100, nil},
		{gb200, nil},
		{l40s, []string{"mig", "nvlink"}},
		{v100, []string{"mig", "row-remap", "recovery-action"}},
		{rtx4090, []string{"mig", "row-remap", "ecc", "nvlink", "recovery-action"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			api, _ := x.machine()
			for id, verdicts := range mocked(t, api) {
				require.Len(t, verdicts, x.count, id)
				for i, v := range verdicts {
					want := Pass
					for _, u := range x.unknown {
						if u == id {
							want = v // Unknown, or Pass where the absence is the healthy state
							require.NotContains(t, []Verdict{Warn, Fail}, v, "%s of GPU %d", id, i)
						}
					}
					require.Equal(t, want, v, "%s of GPU %d", id, i)
				}
			}
		})
	}
}

// Each fault of one GPU of eight gives its verdict for this GPU, and leaves the others healthy.
func TestFaultsByNVML(t *testing.T) {
	const bad = 5
	for name, x := range map[string]struct {
		check string
		want  Verdict
		make  func(g *mock.Device)
	}{
		"a link is down": {"nvlink", Fail, func(g *mock.Device) {
			g.GetNvLinkStateFunc = func(link int) (gonvml.EnableState, gonvml.Return) {
				switch {
				case link >= hgxH100.links:
					return 0, gonvml.ERROR_INVALID_ARGUMENT
				case link == 11:
					return gonvml.FEATURE_DISABLED, gonvml.SUCCESS
				}
				return gonvml.FEATURE_ENABLED, gonvml.SUCCESS
			}
		}},
		"a pending row": {"row-remap", Fail, func(g *mock.Device) {
			g.GetRemappedRowsFunc = func() (int, int, bool, bool, gonvml.Return) { return 0, 1, true, false, gonvml.SUCCESS }
		}},
		"uncorrected errors": {"ecc", Fail, func(g *mock.Device) {
			g.GetTotalEccErrorsFunc = func(e gonvml.MemoryErrorType, _ gonvml.EccCounterType) (uint64, gonvml.Return) {
				if e == gonvml.MEMORY_ERROR_TYPE_UNCORRECTED {
					return 2, gonvml.SUCCESS
				}
				return 0, gonvml.SUCCESS
			}
		}},
		"overheated": {"clocks", Fail, func(g *mock.Device) {
			g.GetCurrentClocksEventReasonsFunc = func() (uint64, gonvml.Return) { return 0x40, gonvml.SUCCESS }
		}},
		"capped": {"power-limit", Warn, func(g *mock.Device) {
			g.GetPowerManagementLimitFunc = func() (uint32, gonvml.Return) { return 500_000, gonvml.SUCCESS }
		}},
		"divided": {"mig", Warn, func(g *mock.Device) {
			g.GetMigModeFunc = func() (int, int, gonvml.Return) { return 1, 1, gonvml.SUCCESS }
		}},
		"prohibited": {"compute-mode", Fail, func(g *mock.Device) {
			g.GetComputeModeFunc = func() (gonvml.ComputeMode, gonvml.Return) { return gonvml.COMPUTEMODE_PROHIBITED, gonvml.SUCCESS }
		}},
		"another program": {"other-processes", Warn, func(g *mock.Device) {
			g.GetComputeRunningProcessesFunc = func() ([]gonvml.ProcessInfo, gonvml.Return) {
				return []gonvml.ProcessInfo{{Pid: 4711, UsedGpuMemory: 62 << 30}}, gonvml.SUCCESS
			}
		}},
		"lost": {"ecc", Unknown, func(g *mock.Device) {
			g.GetEccModeFunc = func() (gonvml.EnableState, gonvml.EnableState, gonvml.Return) { return 0, 0, gonvml.ERROR_GPU_IS_LOST }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			api, gpus := hgxH100.machine()
			x.make(gpus[bad])
			for id, verdicts := range mocked(t, api) {
				for i, v := range verdicts {
					want := Pass
					if id == x.check && i == bad {
						want = x.want
					}
					require.Equal(t, want, v, "%s of GPU %d", id, i)
				}
			}
		})
	}
}
