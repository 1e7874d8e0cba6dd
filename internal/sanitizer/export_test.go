package sanitizer

import "github.com/gochorus/chorus/internal/cudadrv"

// Replace forgets the block that begins at an address, and adds another one there, as if the driver had freed and allocated it.
func (s *Sanitizer) Replace(p cudadrv.DevicePtr) {
	b := s.blocks.at(uint64(p))
	s.allocated(&block{base: b.base, size: b.size, ctx: b.ctx, kind: b.kind})
}
