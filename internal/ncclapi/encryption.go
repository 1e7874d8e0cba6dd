package ncclapi

import "unsafe"

// The modes of EncryptionConfig.
const (
	EncryptionNone int32 = 0
	EncryptionPSK  int32 = 1
)

// MinPSK is the minimum length of a pre-shared key in bytes.
const MinPSK = 32

// EncryptionConfig is ncclEncryptionConfig_t.
type EncryptionConfig struct {
	Size    uintptr
	Magic   uint32
	Version uint32
	Mode    int32
	_       uint32
	PSK     *byte // a NUL-terminated string
}

// NewEncryptionConfig returns an EncryptionConfig for a pre-shared key without NUL bytes.
func NewEncryptionConfig(version int32, psk string) *EncryptionConfig {
	c := &EncryptionConfig{Magic: ConfigMagic, Version: uint32(min(version, newestKnown)), Mode: EncryptionPSK}
	c.Size, c.PSK = unsafe.Sizeof(*c), &append([]byte(psk), 0)[0]
	return c
}
