package gpu

import "github.com/gochorus/chorus/internal/cudadrv"

// Uses tells the sanitizer, if there is one, which memory an operation uses that was just
// enqueued on s. Launches of package kernel need it only for memory whose address is not an
// argument. The calls of list cost nothing without the sanitizer. meets means that the operation
// waits for other devices, and they for it.
func (s *Stream) Uses(name string, meets bool, list func() []cudadrv.Use) {
	if w := s.dev.watcher; w != nil {
		w.Used(cudadrv.Operation{Name: name, Stream: s.h, Uses: list(), Meets: meets})
	}
}
