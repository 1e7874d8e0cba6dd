package nccl

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// SetEncryption validates the configuration. Ranks that meet over Unix sockets are on one host,
// where there is nothing to encrypt, and the connections over TCP are not encrypted, so it
// refuses a key there.
func (l *lib) SetEncryption(cfg *ncclapi.EncryptionConfig) ncclapi.Result {
	const f = ncclapi.FuncSetEncryption
	if r := l.enter(f); r != ncclapi.Success {
		return r
	}
	switch {
	case cfg == nil:
		return ncclapi.Success
	case cfg.Magic != ncclapi.ConfigMagic || cfg.Size != unsafe.Sizeof(*cfg):
		return l.refuse(ncclapi.InvalidArgument, "%s: the configuration is not initialised", f.Name())
	case cfg.Mode == ncclapi.EncryptionNone:
		return ncclapi.Success
	case cfg.Mode != ncclapi.EncryptionPSK:
		return l.refuse(ncclapi.InvalidArgument, "%s: mode %d does not exist", f.Name(), cfg.Mode)
	case cfg.PSK == nil || len(dl.GoString(uintptr(unsafe.Pointer(cfg.PSK)))) < ncclapi.MinPSK:
		return l.refuse(ncclapi.InvalidArgument, "%s: the key has less than %d bytes", f.Name(), ncclapi.MinPSK)
	case l.cfg.Network != "":
		return l.refuse(ncclapi.InvalidUsage, "%s: virtual devices do not encrypt their connections over TCP", f.Name())
	}
	return ncclapi.Success
}
