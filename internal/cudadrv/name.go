package cudadrv

import (
	"strings"

	"github.com/gochorus/chorus/internal/dl"
)

// NameOf returns the C name of the function that call calls first, such as cuMemAlloc, for
// the error of a failed call. The name is then written only once, in the table of symbols.
// NameOf runs call again, on a driver that lacks every function: each driver call returns
// ErrorNotSupported and zeros. call must therefore only call the driver and store results
// that are used only after a success.
func NameOf(call func(drv Driver) Result) string {
	t, asked := dl.Empty[fn](int(numFns), ErrorNotSupported)
	call(&Lib{Table: t})
	if *asked < 0 {
		return "a call of the CUDA driver"
	}
	name, version, ok := strings.Cut(symbols[*asked].Name, "_v")
	if ok && len(version) != 1 {
		return symbols[*asked].Name
	}
	return name
}
