package archtest

import (
	"context"
	"fmt"
	"reflect"
	"runtime"
	"testing"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
	"github.com/gochorus/chorus/timeline"
)

// harmless are methods that do nothing for a receiver without a resource, as after Close, or that a zero value supports.
var harmless = map[string]bool{
	"Close": true, "Shutdown": true, "Abort": true,
	"memory.Slice[float32].RecordStream": true, "tensor.Tensor.Expand": true, "tensor.Tensor.Permute": true, "tensor.Tensor.Unsqueeze": true,
	"nccl.Communicator.DeregisterPool": true, "nccl.Communicator.Err": true, "nccl.Batch.Enqueue": true,
}

// TestZeroValues checks that the methods of types with a Close, and of those that belong to them, return an error and do not panic if the
// receiver is nil or a zero value, as in a program that ignores the error of a constructor.
func TestZeroValues(t *testing.T) {
	for _, ptr := range []any{
		new(amp.Scaler), new(checkpoint.Checkpoint), new(checkpoint.Weights), new(checkpoint.Saved), new(checkpoint.Saver), new(checkpoint.Transfer),
		new(comm.Group), new(comm.Batch), new(comm.Work), new(comm.Experts), new(comm.ExpertRows), new(comm.TensorIssuer),
		new(ddp.Reducer), new(ddp.Sharder[float32]), new(ddp.Units[float32, memory.BFloat16Bits]),
		new(gds.File), new(graph.Exec), new(graph.Callable[float32]),
		new(kernel.Elementwise), new(kernel.Module), new(kernel.Kernel), new(memory.Buffer), new(memory.Slice[float32]), new(memory.Pinned[float32]), new(memory.Pool),
		new(nccl.Communicator), new(nccl.Batch), new(nccl.PreMulSum), new(nccl.DevComm), new(nccl.Window), new(nccl.Registration),
		new(optim.Optimizer), new(optim.Grads), new(stream.Stream), new(stream.Event), new(tensor.Tensor), new(timeline.Recording),
	} {
		zero := reflect.ValueOf(ptr)
		for i := range zero.NumMethod() {
			m := zero.Type().Method(i)
			if last := m.Type.NumOut() - 1; last < 0 || m.Type.Out(last) != reflect.TypeFor[error]() {
				continue
			}
			receivers := map[string]reflect.Value{"zero": zero, "nil": reflect.Zero(zero.Type())}
			if _, byValue := zero.Type().Elem().MethodByName(m.Name); byValue {
				delete(receivers, "nil")
			}
			for name, receiver := range receivers {
				t.Run(fmt.Sprintf("%s %s.%s", name, zero.Type().Elem(), m.Name), func(t *testing.T) {
					defer func() {
						if x := recover(); x != nil {
							t.Errorf("panic: %v", x)
						}
					}()
					out := receiver.Method(i).Call(zeroArguments(m.Type, 1))
					name := fmt.Sprint(zero.Type().Elem(), ".", m.Name)
					if err := out[len(out)-1]; err.IsNil() && !harmless[m.Name] && !harmless[name] {
						t.Errorf("no error")
					}
				})
			}
		}
	}
}

// TestNilDevice checks that functions of a device return an error, and do not panic, if the device is nil.
func TestNilDevice(t *testing.T) {
	for _, fn := range []any{
		memory.ChangeAllocator, memory.EnableCaching, memory.FreeRaw, memory.EmptyCache, memory.StatsOf, memory.ResetPeakStats, memory.ResetAccumulatedStats,
		memory.Allocated, memory.MaxAllocated, memory.Reserved, memory.MaxReserved, memory.SetFraction, memory.Fraction, memory.Backend, memory.RecordHistory,
		memory.Ledger, memory.EmptyHostCache, memory.IPCCollect, memory.MakePinned[float32], memory.PinSlice[float32],
		memory.ReadHostStats, memory.ResetPeakHostStats, memory.ResetAccumulatedHostStats,
		nccl.JoinGrown, nccl.NewCommunicator, nccl.NewScalable, nccl.NewUniqueID, nccl.SetEncryption, nccl.Parameter, nccl.Parameters, nccl.IntParameter,
		nccl.LogParameters, nccl.Version, kernel.Compile, stream.NewEvent, stream.ExternalEvent, stream.OpenEvent, stream.New, stream.External,
		stream.FromPool, stream.PriorityRange, tensor.TuneResults, tensor.WriteTuneResults, tensor.ReadTuneResults, tensor.RecordMatMuls,
	} {
		f := reflect.ValueOf(fn)
		name := runtime.FuncForPC(f.Pointer()).Name()
		t.Run(name, func(t *testing.T) {
			defer func() {
				if x := recover(); x != nil {
					t.Errorf("panic: %v", x)
				}
			}()
			out := f.Call(zeroArguments(f.Type(), 0))
			if last := len(out) - 1; last >= 0 && out[last].Type() == reflect.TypeFor[error]() && out[last].IsNil() {
				t.Errorf("no error")
			}
		})
	}
}

// zeroArguments returns zero values for the parameters of a function from the first on, and none for the variadic one.
func zeroArguments(m reflect.Type, first int) (list []reflect.Value) {
	for i := first; i < m.NumIn(); i++ {
		switch in := m.In(i); {
		case m.IsVariadic() && i == m.NumIn()-1:
		case in == reflect.TypeFor[context.Context]():
			list = append(list, reflect.ValueOf(context.Background()))
		default:
			list = append(list, reflect.Zero(in))
		}
	}
	return list
}
