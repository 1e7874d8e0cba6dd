package kernel

import (
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kern"
)

// accessesOf returns how a kernel uses the memory at each parameter, for the sanitizer: r for
// reading, w for writing, - for neither. A pointer that the parser does not understand counts as
// a read, the weaker use, so that the sanitizer reports only conflicts that exist.
func accessesOf(src *Source, d *Def, said []declared) string {
	if given := kern.Accesses(src, d.Name); given != "" {
		return given
	}
	accesses := []byte(strings.Repeat("-", len(d.Params)))
	for i, p := range d.Params {
		switch {
		case p != Pointer:
		case said == nil || said[i].constant() || !said[i].pointer:
			accesses[i] = 'r'
		default:
			accesses[i] = 'w'
		}
	}
	return string(accesses)
}

// constant reports whether the declaration is of a pointer to constants: const T*.
func (p *declared) constant() bool {
	before, _, _ := strings.Cut(p.text, "*")
	for _, word := range words.FindAllString(before, -1) {
		if word == "const" {
			return true
		}
	}
	return false
}

// usesOf returns the function that lists the memory of a launch. The sanitizer calls it with
// the params of the launch, which are the ptrs of a frame.
func usesOf(accesses string) func(params unsafe.Pointer) []cudadrv.Use {
	return func(params unsafe.Pointer) (uses []cudadrv.Use) {
		f := (*frame)(params)
		for i, a := range accesses {
			if a != '-' && f.bytes[i] > 0 {
				uses = append(uses, cudadrv.Use{Ptr: cudadrv.DevicePtr(f.vals[i]), Bytes: f.bytes[i], Write: a == 'w'})
			}
		}
		return uses
	}
}
