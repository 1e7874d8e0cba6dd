package cudadrv

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNameOf(t *testing.T) {
	var at DevicePtr
	require.Equal(t, "cuMemAlloc", NameOf(func(drv Driver) (r Result) { at, r = drv.MemAlloc(8); return r }))
	require.Zero(t, at)
	require.Equal(t, "cuStreamGetCaptureInfo", NameOf(func(drv Driver) (r Result) { _, r = drv.StreamGetCaptureGraph(0); return r }))
	require.Equal(t, "a call of the CUDA driver", NameOf(func(Driver) Result { return Success }))
}

// Every method of the driver has the name of one C function, and no version in it.
func TestNamesOfAllMethods(t *testing.T) {
	drivers := reflect.TypeFor[Driver]()
	for i := range drivers.NumMethod() {
		m := drivers.Method(i)
		args := make([]reflect.Value, m.Type.NumIn())
		for n := range args {
			args[n] = reflect.Zero(m.Type.In(n))
		}
		if last := len(args) - 1; m.Type.IsVariadic() {
			args[last] = reflect.MakeSlice(m.Type.In(last), 1, 1)
		}
		name := NameOf(func(drv Driver) Result {
			method := reflect.ValueOf(drv).MethodByName(m.Name)
			if m.Type.IsVariadic() {
				method.CallSlice(args)
			} else {
				method.Call(args)
			}
			return Success
		})
		require.Regexp(t, `^cu[A-Z]\w*[a-zA-Z]$`, name, m.Name)
	}
}
