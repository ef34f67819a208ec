"""Device meshes and the rules that map logical axes onto them."""
