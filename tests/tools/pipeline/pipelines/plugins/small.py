from plugins import STEPS


def small(image):
    return image.resize((6, 6)).resize((8, 8))


STEPS.append(small)
